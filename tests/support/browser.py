"""Debian's Chromium for tests and screenshots of the page, driven by playwright."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.support.command import PROGRESS_TIMEOUT_SECONDS

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


def wait_until(page: Any, expression: str, argument: Any = None, seconds: float = PROGRESS_TIMEOUT_SECONDS) -> None:
    """Wait until a JavaScript function returns true. `page.wait_for_function` would violate the page's policy."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
        page.wait_for_timeout(50)


class WatchedTab:
    """A tab whose console errors and foreign requests are collected.

    Attributes:
        page: playwright's page.
    """

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 900})
        self.page.set_default_timeout(1000 * PROGRESS_TIMEOUT_SECONDS)
        self.errors: list[str] = []
        self._origins: set[tuple[str, str]] = set()
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._origins.add(urlsplit(request.url)[:2]))

    def check(self, *origins: tuple[str, str]) -> None:
        """Close it. Assert no error, no request to another origin, and no script of the run's text."""
        assert not self.errors, self.errors
        assert {origin for origin in self._origins if origin[0] not in ("data", "blob")} <= set(origins)
        assert self.page.evaluate("window.hacked") is None
        self.page.close()


def address_of(page: Any) -> str:
    """Return the URL that the page's scripts have set; `page.url` follows it some time later."""
    return page.evaluate("location.href")


def wait_for_chart(page: Any, title: str) -> list[float]:
    """Wait until a chart is drawn, which is after its title is shown; return its `chart_steps`."""
    wait_until(
        page,
        "title => [...document.querySelectorAll('.chart')].some(chart => chart.querySelector('.title')?.textContent"
        " === title && chart.querySelector('.plot')?.chart.plot)",
        title,
    )
    return chart_steps(page, title)


def chart_steps(page: Any, title: str) -> list[float]:
    """Return the horizontal positions of the points that a chart has drawn; [] if there is no such chart."""
    return page.evaluate(
        "title => [...document.querySelectorAll('.chart')].find(chart => chart.querySelector('.title')?.textContent"
        " === title)?.querySelector('.plot')?.chart.plot?.data[0] ?? []",
        title,
    )


def colours_of(page: Any, figure: str) -> int:
    """Return how many different colours a figure of the plots has."""
    return page.evaluate(
        "name => (canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width,"
        " canvas.height).data.buffer)).size)(document.querySelector(`canvas[data-figure=${name}]`))",
        figure,
    )
