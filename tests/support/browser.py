"""Debian's Chromium for tests and screenshots of the page, driven by playwright."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start the browser, without its sandbox: tests run as root in containers."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--force-color-profile=srgb"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


def wait_until(page: Any, expression: str, argument: Any = None, seconds: float = 30) -> None:
    """Wait until a JavaScript function returns true. `page.wait_for_function` would violate the page's policy."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
        page.wait_for_timeout(50)
