"""Takes the README's pictures of the console.

`python docs/screenshots.py --url URL --token-file FILE --job ID --others ID,ID --out docs/images`

Opens the console of a live gateway in headless Chromium as a person would, with the token from the file, and writes
`console-<view>[-phone][-dark].png` for the jobs, the job, its samples, a comparison with other jobs, a chat with it, and the form.
"""
# ruff: noqa: INP001

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """A screen, CSS pixels."""

    suffix: str
    width: int
    height: int
    scale: float
    """Picture pixels per CSS pixel."""


DEVICES = (Device("", 1280, 800, 1.5), Device("-phone", 390, 844, 2.0))
THEMES = {"": "light", "-dark": "dark"}
VIEWS = {
    "jobs": ("#/jobs", "tbody tr"),
    "job": ("#/jobs/{job}", ".chart polyline"),
    "samples": ("#/jobs/{job}/samples", ".rollout"),
    "compare": ("#/compare/{job},{others}", ".overlay polyline"),
    "chat": ("#/chat/{job}", "#message"),
    "submit": ("#/submit", ".fields"),
}
"""Address and what is there once it is drawn."""
PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Two frames later: a busy machine may be long in painting what is already there, and a picture shows what is painted."""


def main() -> int:
    """Writes the pictures and prints their paths."""
    options = _options()
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        print(f"screenshots: none of {', '.join(CHROMIUM)} is installed", file=sys.stderr)  # noqa: T201
        return 2
    token = options.token_file.read_text(encoding="utf-8").strip()
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=ARGUMENTS) as browser,
    ):
        for device, (ending, theme) in product(DEVICES, THEMES.items()):
            with _console(browser, device, theme, options.url, token) as page:
                for view, (address, drawn) in VIEWS.items():
                    path = options.out / f"console-{view}{device.suffix}{ending}.png"
                    _take(
                        page,
                        f"{options.url}/console/{address.format(job=options.job, others=options.others)}",
                        drawn,
                        path,
                    )
                    print(path)  # noqa: T201
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Takes the README's pictures of the console.")
    parser.add_argument(
        "--url", required=True, type=lambda url: url.rstrip("/"), help="the gateway, e.g. http://127.0.0.1:8080"
    )
    parser.add_argument("--token-file", required=True, type=Path, help="holds the gateway's token")
    parser.add_argument("--job", required=True, help="id of the job that is shown")
    parser.add_argument("--others", required=True, help="ids of jobs that it is compared with, commas between them")
    parser.add_argument("--out", default=Path("docs/images"), type=Path, help="directory of the pictures")
    return parser.parse_args()


@contextmanager
def _console(browser: Browser, device: Device, theme: str, url: str, token: str) -> Iterator[Page]:
    """The console on that device, signed in."""
    page = browser.new_page(
        viewport={"width": device.width, "height": device.height},
        device_scale_factor=device.scale,
        color_scheme="dark" if theme == "dark" else "light",
    )
    try:
        page.goto(f"{url}/console/")
        page.get_by_label("Gateway token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Jobs").wait_for()
        yield page
    finally:
        page.close()


def _take(page: Page, address: str, drawn: str, path: Path) -> None:
    page.goto(address)
    page.locator(drawn).first.wait_for(state="attached")
    page.wait_for_timeout(700)  # the last figures are drawn with the next frames
    page.evaluate(PAINTED)
    page.screenshot(path=path, animations="disabled")


if __name__ == "__main__":
    sys.exit(main())
