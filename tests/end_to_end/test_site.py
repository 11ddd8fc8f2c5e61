"""The docs site: built strictly, complete, and asking nobody but its own server."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedrp
from fedrp.config.run import GROUPS
from helpers import ROOT

EXTERNAL = re.compile(r"""<(?:script|img|iframe|link|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_in_the_list(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in [*(path.stem for path in (ROOT / "docs").glob("*.md")), "api", "settings"]:
        assert (site / f"{page}.html").is_file(), page
        assert f'href="{page}.html"' in start, page


def test_links_that_leave_the_pages_lead_to_files_of_the_repository(site: Path) -> None:
    found = 0
    for page in site.glob("*.html"):
        for path in re.findall(r"https://github\.com/fedrp/fedrp/blob/main/([^\"#]+)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
            found += 1
    assert found > 10


def test_reference_pages_are_made_of_the_code(site: Path) -> None:
    settings, api = (site / "settings.html").read_text(), (site / "api.html").read_text()
    for group in GROUPS:
        for name in group.settings:
            assert f"--{name.replace('_', '-')}" in settings, name
    for name in fedrp.__all__:
        assert name == "__version__" or re.search(rf'<h[23] id="fedrp[\w.]*\.{name}"', api), name
    assert "Train a task with the configured algorithm and return what came of it." in api
    assert "Event files in FOLDER/tensorboard" in api


def test_pages_name_no_script_style_or_image_of_another_server(site: Path) -> None:
    """The theme's own script would fetch Mermaid, if a page had a diagram to draw."""
    for page in site.glob("*.html"):
        text = page.read_text()
        assert not EXTERNAL.findall(text), page.name
        assert 'class="mermaid"' not in text, page.name


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_browser_asks_only_the_site_itself(site: Path, address: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        view = browser.new_page()
        asked: list[str] = []
        errors: list[str] = []
        view.on("request", lambda request: asked.append(request.url))
        view.on("pageerror", lambda error: errors.append(str(error)))
        for page in ("index", "architecture", "api", "results"):
            view.goto(f"{address}/{page}.html", wait_until="networkidle")
        browser.close()
    assert asked
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not errors
