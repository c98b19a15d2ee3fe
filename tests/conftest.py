"""Which worker runs what: a file of tests stays together, and so does a folder whose files share a server."""

from typing import Any

import pytest
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
