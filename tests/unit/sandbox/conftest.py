import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prime_rl.sandbox.sandbox import Sandbox

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sandbox" in getattr(item, "fixturenames", ()):
            item.add_marker(needs_bubblewrap)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """One jail, shared by the tests of a file."""
    async with Sandbox(num_jails=1, num_warm=2) as sandbox:
        yield sandbox
