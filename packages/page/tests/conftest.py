"""One browser for the tests of a module."""

import pytest
from tests.support.browser import open_browser


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened
