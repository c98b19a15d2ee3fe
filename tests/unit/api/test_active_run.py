"""`Run` over the real supervisor and small scripts: steps in order, errors, and no process left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest

import prime_rl
from prime_rl.api import active_run
from prime_rl.api.child_command import ChildCommand
from prime_rl.core.errors import ConfigError, RunError
from tests.support.command import END_TIMEOUT_SECONDS, until

FEW = {"max_steps": 3, "grace_timeout_seconds": 1}


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """Make runs of scripts: `small_run("three")`."""

    def start(command, arguments, paths):
        return ChildCommand("tests.unit.api.small_run" if command == "rl" else command, arguments, paths)

    def make(kind, **values):
        monkeypatch.setenv("SMALL_RUN", kind)
        return prime_rl.Run(output_dir=tmp_path / "out", config={**FEW, **values})

    monkeypatch.setattr(active_run, "ChildCommand", start)
    return make


def processes_of(pid):
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def assert_ended(processes):
    _, left = psutil.wait_procs(processes, timeout=END_TIMEOUT_SECONDS)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


async def test_run_yields_each_step_once_and_serves_until_the_block_ends(small_run):
    """The synchronous form, inside an event loop."""
    with small_run("three") as run:
        steps = list(run)
        processes = processes_of(run.pid)
        assert len(processes) >= 2, "rl and the server"
        assert run.is_over
        assert list(run) == []
        with urllib.request.urlopen(run.page(), timeout=30) as page:
            assert page.status == 200
        (served,) = run._pages
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use"):
                run.page(port)
    assert [(step.number, step.reward) for step in steps] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert steps[2].staleness == 2
    assert_ended(processes)
    assert served.exit_code is not None


async def test_run_async_break_ends_all_processes(small_run):
    async with small_run("endless") as run:
        async for step in run:
            if step.number == 2:
                break
        processes = processes_of(run._run.pid)
    assert len(processes) >= 4
    assert_ended(processes)


async def test_run_whose_start_is_cancelled_ends_all_processes(small_run):
    run = small_run("endless")
    start = asyncio.create_task(run.__aenter__())
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    until(lambda: run._active is not None, "the start")
    assert not psutil.pid_exists(run._run.pid)


async def test_run_evaluations_at_once_have_a_folder_each(small_run, monkeypatch):
    used = []
    monkeypatch.setattr(active_run, "run_evaluation", lambda run, url, paths, *_: used.append(paths.root))
    monkeypatch.setattr(active_run.ActiveRun, "wait_until_serving", lambda self: None)
    async with small_run("endless") as run:
        await asyncio.gather(*(run.evaluate(k=k) for k in range(1, 9)))
    assert len(set(used)) == 8


@pytest.mark.extended
def test_run_exception_in_the_loop_ends_all_processes_and_is_raised(small_run):
    processes = []
    with pytest.raises(ZeroDivisionError), small_run("endless") as run:
        for _ in run:
            processes += processes_of(run.pid)
            raise ZeroDivisionError
    assert_ended(processes)


@pytest.mark.extended
def test_run_failed_process_raises_run_error_with_its_log(small_run):
    with (
        pytest.raises(prime_rl.RunError, match=r"trainer exited with code 3; log .*trainer\.log"),
        small_run("failing") as run,
    ):
        run.wait()


@pytest.mark.extended
def test_run_failure_outside_the_loop_is_raised_at_the_end(small_run):
    with pytest.raises(prime_rl.ConfigError, match=r"trainer.optim.lr = -1"), small_run("bad_input") as run:
        until(lambda: run._rl.exit_code is not None, "rl to exit")


SCRIPT = """
import os, sys, prime_rl
from prime_rl.api import active_run
from prime_rl.api.child_command import ChildCommand
from prime_rl.core.errors import ConfigError, RunError
active_run.ChildCommand = lambda command, *rest: ChildCommand("tests.unit.api.small_run", *rest)
os.environ["SMALL_RUN"] = "endless"
with prime_rl.Run(output_dir=sys.argv[1], config={"grace_timeout_seconds": 1}) as run:
    for step in run:
        print(run.pid, flush=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_run_ends_with_the_program_that_started_it(tmp_path, number):
    program = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(program.stdout.readline())
    processes = processes_of(pid)
    os.kill(program.pid, number)
    program.stdout.close()
    assert program.wait(END_TIMEOUT_SECONDS) == -number
    assert_ended(processes)


def test_run_methods_outside_the_block_are_refused(tmp_path, small_run, monkeypatch):
    """A server of `client.base_url`, which lives on, may sample from the policy of another run by then."""
    with pytest.raises(RuntimeError, match="with Run"):
        prime_rl.Run(output_dir=tmp_path).page()
    monkeypatch.setattr(active_run, "answers", lambda url: True)
    with small_run("three") as run:
        pass
    for ask in (lambda: run.chat("abc"), run.evaluate):
        with pytest.raises(RunError, match=r"the run has ended, .* ask within the `with` block"):
            ask()
