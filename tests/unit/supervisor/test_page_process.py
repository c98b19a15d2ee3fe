"""The page that `rl --page` serves, in a real process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest

from prime_rl.configs.rl import PageConfig
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor import launch
from prime_rl.supervisor.launch import serve_page
from prime_rl.supervisor.process_tree import ProcessTree
from tests.support.command import PROGRESS_TIMEOUT_SECONDS
from tests.support.server import free_port

pytestmark = pytest.mark.extended


async def fetch(url, page):
    """Body of a response of the page, as soon as it answers."""

    def get():
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read()

    async with asyncio.timeout(PROGRESS_TIMEOUT_SECONDS):
        while True:
            try:
                return await asyncio.to_thread(get)
            except OSError:  # refused, or no answer in time
                assert not page.done()
                await asyncio.sleep(0.1)


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "run.toml").write_text("max_steps = 1\n")
    return RunPaths(tmp_path)


async def test_page_is_served_until_the_run_ends_also_on_a_full_disk(paths, monkeypatch):
    monkeypatch.setattr(launch, "_PAGE_STOP_SECONDS", 60.0)
    paths.metrics_dir.mkdir()
    paths.metrics("trainer").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo\n{"step": 2, "loss": 0.5}\n{"st')
    paths.log("page").parent.mkdir()
    paths.log("page").symlink_to("/dev/full")
    lines, tree, port = [], ProcessTree(), free_port()
    task = asyncio.ensure_future(serve_page(PageConfig(port=port), paths, lines.append, tree.ignored))
    overview = json.loads(await fetch(f"http://127.0.0.1:{port}/api/runs/{paths.root.name}/overview", task))
    assert overview["headline"]["num_damaged"] == 1, "the half line at the end is not damaged, but not complete yet"
    assert next(one["count"] for one in overview["metrics"] if one["name"] == "trainer:loss") == 2
    assert lines == [f"page: http://127.0.0.1:{port}, log {paths.log('page')}"]
    (pid,) = tree.ignored
    assert "prime_rl_page" in psutil.Process(pid).cmdline()
    assert pid not in [member.pid for member in tree.scan({})]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid) and len(lines) == 1


async def test_page_that_does_not_end_is_killed(paths, monkeypatch):
    monkeypatch.setattr(launch, "_PAGE_STOP_SECONDS", 0.1)
    monkeypatch.setattr(launch, "_PAGE_KILL_SECONDS", 60.0)
    lines, ignored = [], set()
    task = asyncio.ensure_future(serve_page(PageConfig(port=0), paths, lines.append, ignored))
    async with asyncio.timeout(PROGRESS_TIMEOUT_SECONDS):
        while "page: http" not in (paths.log("page").read_text() if paths.log("page").exists() else ""):
            assert not task.done(), lines
            await asyncio.sleep(0.1)
    (pid,) = ignored
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)  # until then SIGTERM would end it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid)
    (line,) = lines
    address = line.split()[1].removesuffix(",")
    assert address in paths.log("page").read_text() and not address.endswith(":0"), "port 0 takes a free one"


def test_page_of_a_directory_without_a_run_says_so_and_a_missing_one_is_refused(tmp_path):
    command = [sys.executable, "-m", "prime_rl_page", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = process.stdout.readline(), process.stdout.readline()
        process.terminate()
    assert lines[0].startswith("page: http") and "contains no run yet" in lines[1]
    command[3] = str(tmp_path / "typo")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/typo does not exist; pass the output_dir of a run")


async def test_page_that_cannot_start_is_a_warning(paths):
    with socket.create_server(("127.0.0.1", 0)) as other:
        lines = []
        await serve_page(PageConfig(port=other.getsockname()[1]), paths, lines.append, set())
    assert lines[1].startswith("warning: the page exited with code 2; the run continues"), lines
    assert "cannot listen" in paths.log("page").read_text()
