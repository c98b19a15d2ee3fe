"""Runs in a real Jupyter kernel, which has a running event loop."""

from contextlib import suppress
from pathlib import Path

import jupyter_client
import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.command import END_TIMEOUT_SECONDS, alive, clean_environment, offspring, until
from tests.support.server import free_port

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
CELL_TIMEOUT_SECONDS = 240

RUN = """
import prime_rl as rl

run = rl.Run("configs/reverse_text/model", {"id": "reverse_text", "args": {"words": 200}}, output_dir="outputs",
             seq_len=64, config={"orchestrator.batch_size": 16, "orchestrator.sampling.max_tokens": 8})
"""
LOOP = """
async with run:
    async for step in run:
        print("step", step.number)
        if step.number == LAST:
            break
"""


class Kernel:
    """A running kernel and the processes that it has started."""

    def __init__(self, folder: Path) -> None:
        self._before = set(offspring())
        ports = {"PRIME_INFERENCE__SERVER__PORT": str(free_port())}
        self.manager = jupyter_client.KernelManager()
        self.manager.start_kernel(cwd=str(folder), env={**clean_environment(), **ports})
        self._client = self.manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=CELL_TIMEOUT_SECONDS)
        self.pids = {self.manager.provisioner.pid}

    def start(self, cell: str) -> str:
        """Start a cell; return the id of the request."""
        return str(self._client.execute(cell))

    def read(self, request: str, until_text: str | None = None) -> str:
        """Return what a cell prints up to its end, or up to `until_text`; AssertionError if it raises."""
        text = ""
        while until_text is None or until_text not in text:
            message = self._client.get_iopub_msg(timeout=CELL_TIMEOUT_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            assert kind != "error", "\n".join(content["traceback"])
            text += content["text"] if kind == "stream" else ""
            if kind == "status" and content["execution_state"] == "idle":
                break
        return text

    def others(self) -> list[psutil.Process]:
        """The living processes of the runs."""
        self.pids.add(self.manager.provisioner.pid)
        found = offspring()
        return [found[pid] for pid in set(found) - self._before - self.pids if alive(found[pid])]

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        for process in self.others():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()


@pytest.fixture
def kernel(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    started = Kernel(tmp_path)
    yield started
    started.close()


@pytest.mark.parametrize("now", [True, False], ids=["killed", "asked"])
def test_run_in_a_cell_ends_with_its_block_and_with_the_kernel(kernel, now):
    kernel.read(kernel.start(RUN))
    if now:
        assert kernel.read(kernel.start(LOOP.replace("LAST", "1"))).splitlines() == ["step 0", "step 1"]
        until(lambda: not kernel.others(), f"the end of {kernel.others()}", END_TIMEOUT_SECONDS)
        kernel.read(kernel.start(RUN))
    assert "step 1" in kernel.read(kernel.start(LOOP.replace("LAST", "None")), "step 1")
    assert kernel.others()
    kernel.manager.restart_kernel(now=now)
    until(lambda: not kernel.others(), f"the end of {kernel.others()}", END_TIMEOUT_SECONDS)
