"""The compiled interpreter of the backend `wasm`: cached by its contents; one line if it cannot be made or loaded."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import psutil
import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.sandbox.sandbox import Sandbox
from prime_rl.sandbox.wasm import component

from .conftest import needs_wasm

pytestmark = needs_wasm


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "prime_rl"


def test_component_path_depends_on_the_versions(cache, monkeypatch):
    before = component.component_path()
    assert before.parent == cache
    monkeypatch.setattr(component, "version", lambda name: "1.0")
    assert component.component_path() != before


def test_build_component_that_fails_is_one_line_and_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(component, "_BUILD", "raise SystemExit('first\\nno compiler')")
    with pytest.raises(ConfigError, match=r"cannot compile .*: no compiler$"):
        component.build_component()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_build_component_without_a_writable_cache_names_it(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(ConfigError, match="cannot write the compiled interpreter to /proc/none/prime_rl"):
        component.build_component()


async def test_damaged_component_is_one_line(cache):
    cache.mkdir()
    component.component_path().write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="backend wasm did not start") as caught:
        await Sandbox("wasm", num_jails=1).__aenter__()
    assert "\n" not in str(caught.value)


@pytest.mark.extended
async def test_interpreter_ends_with_its_supervisor():
    async with Sandbox("wasm", num_jails=1, num_warm=1) as sandbox, sandbox.session() as session:
        (jail,) = sandbox.jail_pids
        before = interpreters(jail)
        cell = asyncio.create_task(session.run("while True: pass", timeout=600))
        busy = []
        async with asyncio.timeout(60):  # another interpreter, which is being prepared, takes less, and may have ended
            while not busy:
                busy = [process for process, used in interpreters(jail).items() if used - before.get(process, used) > 1]
                await asyncio.sleep(0.05)
        (interpreter,) = busy
        home = Path(interpreter.cwd())
        interpreter.parent().kill()
        await cell
        _, alive = await asyncio.to_thread(psutil.wait_procs, busy, 60)
        assert not alive
    shutil.rmtree(home)  # its supervisor could not do it


def interpreters(jail):
    """Return the processes without children below a jail, and their user time in seconds."""
    found = {}
    for process in psutil.Process(jail).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not process.children():
                found[process] = process.cpu_times().user
    return found
