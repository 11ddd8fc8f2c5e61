"""A real browser, and what a page did in it."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """The browser of this machine, without a window."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser to look at pages with: install one of {', '.join(PROGRAMS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Seen:
    """A page, and what it did since it was opened."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def data(self, chart: str) -> list[dict[str, Any]]:
        """The traces of a chart as the browser draws them."""
        return list(self.page.evaluate(f"document.getElementById('chart-{chart}').data"))

    def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        """Until an expression is true. Playwright's own way of waiting evaluates text, which pages may forbid."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            self.page.wait_for_timeout(100)

    def colour(self, name: str) -> str:
        """A colour of the page as it is now."""
        return str(
            self.page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        )


@contextlib.contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Seen]:
    """A page that is complete; with JavaScript, once its charts are drawn."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    seen = Seen(context.new_page())
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    seen.page.on("console", lambda message: message.type == "error" and seen.errors.append(message.text))
    seen.page.on("request", lambda request: seen.requests.append(request.url))
    seen.page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
    seen.page.goto(address)
    if options.get("java_script_enabled", True):
        seen.page.wait_for_selector("html[data-ready]", state="attached")
    try:
        yield seen
    finally:
        context.close()
