import os
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import pytest_asyncio
from prime_service import running_service
from tests.support.isolation import needs_isolation

from prime_rl_sandbox.execution import SandboxSettings, use_settings
from prime_rl_sandbox.sandbox import Sandbox

BACKENDS = [
    pytest.param("bwrap", marks=needs_isolation),
    pytest.param("prime", marks=[needs_isolation, pytest.mark.extended]),
]


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    """Restore the settings of the process, which a test may change."""
    yield
    use_settings(SandboxSettings())


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def sandbox(request, tmp_path_factory) -> AsyncIterator[Sandbox]:
    """One jail, shared by the tests of a file. Remote machines are processes of this one.

    This process has as many open descriptors as one with hundreds of connections to inference servers.
    """
    for _ in range(300):
        request.addfinalizer(partial(os.close, os.open(os.devnull, os.O_RDONLY)))
    if request.param != "prime":
        async with Sandbox(request.param, num_jails=1, num_warm=2) as sandbox:
            yield sandbox
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        home = tmp_path_factory.mktemp("home")
        async with running_service(monkeypatch, home), Sandbox("prime", num_jails=1, num_warm=2) as sandbox:
            yield sandbox
