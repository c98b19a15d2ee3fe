"""Which worker runs what: a file of tests stays together, so does a folder whose files share a server. And the log."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loguru import logger
from xdist.scheduler import LoadScopeScheduling

SHARED = ("tests/integration/inference/", "tests/integration/rl/")


class _ByServer(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARED if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Divide the tests; in order, so that the long ones with real servers come first and the short ones fill up."""
    config.option.loadscopereorder = False
    return _ByServer(config, log)


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    """What has been logged so far in this process, a line each."""
    lines = list[str]()
    handler = logger.add(lambda message: lines.append(str(message).rstrip()), format="{message}")
    yield lambda: lines
    logger.remove(handler)
