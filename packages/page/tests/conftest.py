"""One browser for the tests of a module, and tabs for the address that a module's fixture `served` returns."""

import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from tests.support.browser import WatchedTab, open_browser


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def tab(browser, served):
    watched = WatchedTab(browser)
    yield watched
    watched.check(("http", urlsplit(served).netloc))


@pytest.fixture(scope="session")
def page_process():
    """A function that runs a page process for directories; it yields the process and its address."""

    @contextmanager
    def run(*roots):
        command = [sys.executable, "-m", "prime_rl_page", *map(str, roots), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            yield process, process.stdout.readline().split()[1]
            process.terminate()

    return run
