"""Screenshots of the report and of the live page, for docs/report.md.

    python scripts/screenshots.py [FOLDER]

FOLDER is that of a run or of a comparison; without it, `fedrp compare` is run first, for a minute or so. It needs
Chromium on the PATH, playwright and Pillow. Pictures go to docs/figures/.
"""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, ViewportSize, sync_playwright

from fedrp.reporting.live import served
from fedrp.reporting.page import write_report
from fedrp.reporting.runs import Run, read_runs

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
WIDE, PHONE = ViewportSize(width=1180, height=800), ViewportSize(width=390, height=800)
COMPARED = ["compare", "--rounds", "10", "--clients", "10", "--seed", "0"]
MOST_BYTES = 150_000


def shoot(browser: Browser, address: str, name: str, size: ViewportSize, dark: bool = False) -> None:
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", device_scale_factor=1)
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = FIGURES / f"{name}.png"
    picture.save(path, optimize=True)
    context.close()
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has more than {MOST_BYTES:,} bytes: make its window smaller")


def halfway(runs: list[Run]) -> list[Run]:
    """The runs as they were in the middle of the last one."""
    *done, last = runs
    return [*done, last._replace(result=None, history=last.history[: len(last.history) // 2])]


def main() -> None:
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        folder = Path(sys.argv[1]) if sys.argv[1:] else Path(work) / "compare"
        if not sys.argv[1:]:
            subprocess.run([sys.executable, "-m", "fedrp", *COMPARED, "--out", str(folder)], check=True)  # noqa: S603
        runs = read_runs([folder])
        print(json.dumps([run.name for run in runs]))
        report = Path(work) / "report.html"
        write_report(runs, report)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shoot(browser, report.as_uri(), "report", WIDE)
        shoot(browser, report.as_uri(), "report_phone", PHONE)
        with served(lambda: halfway(runs), "over") as address:
            shoot(browser, address, "report_live", WIDE, dark=True)
        browser.close()


if __name__ == "__main__":
    main()
