import importlib.util
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prime_rl.sandbox.sandbox import Sandbox

from .prime_service import running_service

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
needs_wasm = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("wasmtime", "componentize_py"))), reason="the extra `wasm` is not installed"
)
BACKENDS = [
    pytest.param("bwrap", marks=needs_bubblewrap),
    pytest.param("wasm", marks=[needs_wasm, pytest.mark.extended]),
    pytest.param("prime", marks=pytest.mark.extended),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def sandbox(request, tmp_path_factory) -> AsyncIterator[Sandbox]:
    """One jail, shared by the tests of a file. Remote machines are processes of this one."""
    if request.param != "prime":
        async with Sandbox(request.param, num_jails=1, num_warm=2) as sandbox:
            yield sandbox
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        home = tmp_path_factory.mktemp("home")
        async with running_service(monkeypatch, home), Sandbox("prime", num_jails=1, num_warm=2) as sandbox:
            yield sandbox


@pytest.fixture
def native(sandbox) -> Sandbox:
    """The same, where it can start processes."""
    if sandbox.backend == "wasm":
        pytest.skip("WebAssembly has no processes and threads")
    return sandbox
