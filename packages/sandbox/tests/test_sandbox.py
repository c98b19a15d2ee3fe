import asyncio
import contextlib
import math
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from loguru import logger
from tests.support.isolation import needs_isolation

from prime_rl_sandbox.execution import SandboxLimits, SandboxSettings, TestCase, Verdict, use_settings
from prime_rl_sandbox.jail import jail_pool
from prime_rl_sandbox.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_run_python_code_returns_streams_exit_code_and_time(sandbox):
    code = "import sys; print(input()); print('warning', file=sys.stderr); sys.exit(3)"
    result = await sandbox.run(code, stdin="hello ä\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("hello ä\n", "warning\n", 3)
    assert result.verdict is Verdict.ERROR
    assert 0 < result.milliseconds < 60_000


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("import sys; print(sys.stdin.read() == '')", "True\n"),
        ("import atexit; atexit.register(print, 'bye'); print('hi')", "hi\nbye\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))", "A(x=1)\n"),
        ("if __name__ == '__main__': print(__name__)", "__main__\n"),
        ("open('a', 'w').write('x'); print(open('a').read())", "x\n"),
        ("import tempfile; print(tempfile.gettempdir())", "/tmp\n"),
        ("print(sum(range(10**6)))", "499999500000\n"),
        ("import xml.dom.minidom as m; print(m.parseString('<a/>').documentElement.tagName)", "a\n"),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 5)))", "5\n"),
        ("import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)", "hi\n\n"),
        (
            "import socket\nserver = socket.create_server(('127.0.0.1', 8099))\n"
            "print(socket.create_connection(('localhost', 8099)).getpeername())",
            "('127.0.0.1', 8099)\n",
        ),
        ("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))", "[1, 2]\n"),
        ("import threading\nthreading.Thread(target=lambda: print('thread')).start()", "thread\n"),
        ("print(1)\nexit()\nprint(2)", "1\n"),
        ("print(1)\nquit(0)", "1\n"),
    ],
)
async def test_run_useful_programs_work(sandbox, code, stdout):
    result = await sandbox.run(code, timeout=20)
    assert (result.stderr, result.stdout, result.verdict) == ("", stdout, Verdict.OK)


async def test_run_argv_runs_another_program_with_files(sandbox):
    result = await sandbox.run(
        argv=["/bin/sh", "-c", "cat in/a.txt; tr a-z A-Z > out.txt; ln -s out.txt link"],
        stdin="text",
        files={"in/a.txt": b"\xffA"},
        outputs=["out.txt", "missing", "link"],
    )
    assert result.stdout == "\udcffA"
    assert result.files == {"out.txt": b"TEXT"}
    missing = await sandbox.run(argv=["/bin/missing"])
    assert (missing.exit_code, missing.verdict) == (127, Verdict.ERROR)
    large = "x" * 500_000
    assert (await sandbox.run(argv=["/bin/cat"], stdin=large)).stdout == large


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        *(({"code": "1", "files": {name: "x"}}, "working directory")
          for name in ("/etc/x", "../x", "a/../../x", "", ".", "a\0b")),
        ({"code": "1", "outputs": ["../x"]}, "working directory"),
        ({"code": "1", "files": {"x": bytes(10 * 2**20)}}, "disk_bytes"),
        ({"code": "1", "files": {"a\ud800": "x"}}, "surrogate"),
        ({"argv": ["/bin/echo", "a\0b"]}, "null character"),
        ({}, "either code or argv"),
        ({"code": "1", "stdin": b"a"}, "not of type bytes"),
        *(({"code": "1", "timeout": timeout}, "it must be positive") for timeout in (0, -1, math.inf, math.nan)),
    ],
)  # fmt: skip
async def test_run_request_that_no_program_can_answer_is_refused(sandbox, request_, message):
    with pytest.raises(ValueError, match=message):
        await sandbox.run(**request_)


async def test_session_or_test_that_nothing_can_answer_is_refused_and_a_long_name_is_an_error(sandbox):
    async with sandbox.session() as session:
        with pytest.raises(ValueError, match="it must be positive"):
            await session.run("1", timeout=math.nan)
    with pytest.raises(ValueError, match="a test expects 1 on stdout, which is text: use '1'"):
        await sandbox.execute_code("print(1)", [TestCase(input="1", expected=1)])
    assert (await sandbox.run("1", files={"x" * 300: "x"}, timeout=10)).verdict is Verdict.ERROR


async def test_run_traceback_shows_the_code_and_not_the_sandbox(sandbox):
    result = await sandbox.run("def f():\n    return 1 / 0\nf()")
    assert "jail" not in result.stderr
    assert "    return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in (await sandbox.run("def f(:")).stderr


async def test_execute_code_compares_outside_of_the_sandbox(sandbox):
    code = "def half(x): return x / 2\nif __name__ == '__main__':\n    print(half(float(input())))\n    print()"
    results = await sandbox.execute_code(
        code,
        [
            TestCase(input="3", expected="1.5"),
            TestCase(input="3", expected="1.6"),
            TestCase(input="3", expected="1.5000000001", compare="tolerance"),
            TestCase(input="3", expected=1, compare=lambda output, expected: float(output) > expected),
            TestCase(function="half", args=[5], expected=2.5),
            TestCase(function="half", kwargs={"x": 5}, expected=2),
            TestCase(function="missing", expected=None),
        ],
        timeout_ms=10_000,
    )
    assert [result.passed for result in results] == [True, False, True, True, True, False, False]
    assert results[0].output == "1.5\n\n"
    assert results[4].output == 2.5
    assert results[6].verdict is Verdict.ERROR
    assert all(result.latency_ms > 0 for result in results)


VALUES = [
    (1, [2.5, {"a": None}]), {1: {2, 3}}, frozenset([1]), b"\x00", 1 + 2j, 10**1000, True, "ä\ud800", -math.inf,
]  # fmt: skip


async def test_execute_code_values_of_functions_keep_their_types(sandbox):
    tests = [TestCase(function="f", args=[value], expected=value) for value in VALUES]
    code = "def f(x): return x\ndef g(n): yield from range(n)"
    *results, of_generator = await sandbox.execute_code(
        code, [*tests, TestCase(function="g", args=[3], expected=[0, 1, 2])], timeout_ms=10_000
    )
    for value, result in zip(VALUES, results, strict=True):
        assert result.passed
        assert (result.output, type(result.output)) == (value, type(value))
    assert of_generator.passed, "a generator is compared as a list"


async def test_session_keeps_state_and_survives_errors_and_timeouts(sandbox):
    async with sandbox.session() as session:
        assert (await session.run("import os\nx = 20")).value is None
        assert (await session.run("print('hi')\nx + 1")).value == "21"
        failed = await session.run("1 / 0")
        assert failed.verdict is Verdict.ERROR
        assert failed.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
        written = await session.run("open('b', 'w').write(open('a').read())", files={"a": "text"}, outputs=["b"])
        assert written.files == {"b": b"text"}
        assert (await session.run("raise SystemExit(1)")).verdict is Verdict.ERROR
        assert (await session.run("x")).value == "20"
        assert (await session.run("while True: pass", timeout=0.1)).verdict is Verdict.TIMEOUT
        assert session.alive
        assert (await session.run("x")).value == "20"


async def test_session_that_ends_reports_it_for_every_later_cell(sandbox):
    async with sandbox.session() as session:
        assert (await session.run("import os; os._exit(0)")).verdict is Verdict.ERROR
        assert not session.alive
        assert (await session.run("1")).verdict is Verdict.ERROR
    stuck = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    async with sandbox.session() as session:
        assert (await session.run(stuck, timeout=0.1)).verdict is Verdict.TIMEOUT
        assert not session.alive


async def test_session_call_reaches_the_host_and_returns_its_answer(sandbox):
    asked = []

    async def answer(text: str) -> str:
        asked.append(text)
        return text.upper()

    async with sandbox.session(answer) as session, sandbox.session() as other:
        assert (await session.run("host_call('abc') + '!'")).value == "'ABC!'"
        assert (await other.run("host_call('abc')")).verdict is Verdict.ERROR
    assert asked == ["abc"]


async def test_sessions_with_large_commands_that_nobody_reads_time_out(sandbox):
    # A thread reports a cell that has not ended, and the main thread never reads another command.
    forged = (
        "import json, os, struct, time\nreport = json.dumps({'failed': False}).encode()\n"
        "os.write(4, struct.pack('>I', len(report)) + report)\nwhile True: time.sleep(1)"
    )
    async with sandbox.session() as session:
        assert (await session.run(forged)).ok
        blocked = await session.run("#" * 2**20, timeout=0.2)
        assert blocked.verdict in (Verdict.TIMEOUT, Verdict.ERROR)
    assert (await sandbox.run("print(1)")).ok


async def test_session_survives_an_answer_after_the_timeout(sandbox):
    async def answer(text: str) -> str:
        await asyncio.sleep(0.8)
        return "late"

    async with sandbox.session(answer) as session:
        assert (await session.run("x = 1; host_call('a')", timeout=0.3)).verdict is Verdict.TIMEOUT
        assert session.alive
        assert (await session.run("x + 1", timeout=10)).value == "2"


async def test_session_that_ends_while_the_host_answers_is_no_failure_of_the_sandbox(sandbox):
    async def answer(text: str) -> str:
        await asyncio.sleep(0.3)  # longer than the cell, but it ends so after any answer
        return ""

    async with sandbox.session(answer) as session:
        code = (
            "import os, threading, time\nthreading.Thread(target=host_call, args=['a']).start()\n"
            "time.sleep(0.1)\nos._exit(3)"
        )
        assert (await session.run(code, timeout=10)).verdict is Verdict.ERROR


@pytest.mark.extended
async def test_run_executions_at_once_really_overlap(sandbox):
    code = "import time; begin = time.monotonic(); time.sleep(2); print(begin, time.monotonic())"
    results = await asyncio.gather(*(sandbox.run(code, timeout=30) for _ in range(20)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    assert max(sum(begin <= moment <= end for begin, end in spans) for moment, _ in spans) >= 5


def find_processes(jail_pid, argument):
    """Return the processes in a jail that have this argument."""
    found = []
    for child in psutil.Process(jail_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if argument in child.cmdline():
                found.append(child)
    return found


async def find_process(sandbox, argument, after=None):
    """Wait for the process with this argument in the only jail, or in the one that replaces the jail `after`."""
    async with asyncio.timeout(60):
        while True:
            for jail in set(sandbox.jail_pids) - {after}:
                with contextlib.suppress(psutil.Error):  # it has ended, or has not started
                    for process in find_processes(jail, argument):
                        return process
            await asyncio.sleep(0.01)


async def test_run_cancelled_ends_its_processes(sandbox):
    (jail,) = sandbox.jail_pids
    task = asyncio.create_task(sandbox.run(argv=["/bin/sleep", "987"], timeout=1000))
    while not find_processes(jail, "987"):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while find_processes(jail, "987"):
        await asyncio.sleep(0.01)
    assert (await sandbox.run("print(1)")).ok


@needs_isolation
async def test_run_jail_killed_meanwhile_is_retried_in_a_new_one():
    async with Sandbox(num_jails=1, num_warm=1) as own:
        (first,) = own.jail_pids
        task = asyncio.create_task(own.run(argv=["/bin/sh", "-c", "sleep 987; echo done"], timeout=1000))
        await find_process(own, "987")
        os.kill(first, signal.SIGKILL)
        (await find_process(own, "987", after=first)).kill()
        result = await task
        assert (result.stdout, result.verdict) == ("done\n", Verdict.OK)
        assert own.jail_pids != [first]


@needs_isolation
async def test_sessions_above_the_limit_wait_and_those_of_assert_style_tests_do_not(monkeypatch):
    monkeypatch.setattr(jail_pool, "_MAX_SESSIONS", 1)
    async with Sandbox(num_jails=1, num_warm=2) as own:
        async with own.session() as first:
            second = own.session()
            task = asyncio.create_task(second.__aenter__())
            cancelled = asyncio.create_task(own.session().__aenter__())
            assert (await own.run_asserts("def f(): return 1", "assert f() == 1", ["f"])).passed
            assert (await first.run("1")).ok and not task.done()
            cancelled.cancel()
        await task
        await second.__aexit__(None, None, None)
        async with own.session() as third:
            assert (await third.run("1")).ok


@pytest.mark.extended
@needs_isolation
@pytest.mark.parametrize("num_jails", [1, 2])
async def test_run_many_survive_a_fork_server_that_is_killed(num_jails):
    """Its bubblewrap runs for a while longer, and looks like the jail with the fewest executions."""
    async with Sandbox(num_jails=num_jails) as own:
        tasks = [asyncio.create_task(own.run(f"print({number})", timeout=30)) for number in range(60)]
        await asyncio.sleep(0.05)
        outer = psutil.Process(own.jail_pids[0])
        (inner,) = outer.children()
        (server,) = inner.children()
        for process in (outer, inner):
            process.suspend()
        server.kill()
        assert [(await task).stdout for task in tasks] == [f"{number}\n" for number in range(60)]


@needs_isolation
async def test_close_leaves_no_process():
    async with Sandbox(num_jails=2, num_warm=2) as own:
        session = await own.session().__aenter__()
        await session.run("import subprocess; subprocess.Popen(['sleep', '100'])")
        jails = [psutil.Process(pid) for pid in own.jail_pids]
        before = [process for jail in jails for process in (jail, *jail.children(recursive=True))]
        assert len(before) >= 10
    _, alive = await asyncio.to_thread(psutil.wait_procs, before, 30)
    assert alive == []


@needs_isolation
async def test_paths_and_preload_of_the_run_give_code_a_package():
    report = "import sys; print('small' in sys.modules); import small; print(small.count(), small.__file__)"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # /tmp belongs to the sandbox
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "small.py").write_text(
            "number = 0\ndef count():\n    global number\n    number += 1\n    return number"
        )
        for preload in ((), ("small",)):
            use_settings(SandboxSettings(paths=(folder,), preload=preload, num_jails=1))
            async with Sandbox(num_warm=2) as own:
                expected = f"{bool(preload)}\n1 {folder}/small.py\n"
                for _ in range(2):  # each execution has a copy
                    assert (await own.run(report, timeout=20)).stdout == expected
                async with own.session() as session:
                    assert (await session.run(report, timeout=20)).stdout == expected
                shadowed = await own.run("import small; print(small.x)", files={"small.py": "x = 2"}, timeout=20)
                assert shadowed.ok != bool(preload)  # the working directory comes first
                program = ["/usr/bin/env", "python3", "-c", "import small; print(small.count())"]
                assert (await own.run(argv=program, timeout=20)).stdout == "1\n"
                written = await own.run(f"open({str(folder / 'x')!r}, 'w')", timeout=20)
                assert "Read-only file system" in written.stderr


@pytest.mark.parametrize(("num_processors", "num_jails"), [(2, 2), (64, 8)])
async def test_sandbox_has_a_jail_per_processor_and_at_most_eight(monkeypatch, num_processors, num_jails):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(num_processors))
    assert Sandbox("unsafe-subprocess")._pool._num_jails == num_jails


@needs_isolation
async def test_limits_smaller_memory_is_kept():
    async with Sandbox(num_jails=1, limits=SandboxLimits(memory_bytes=200 * 2**20)) as own:
        assert (await own.run("x = bytearray(50 * 2**20)")).ok
        assert (await own.run("x = bytearray(250 * 2**20)")).verdict is Verdict.MEMORY


async def test_unsafe_subprocess_runs_the_same_programs_and_warns():
    messages = []
    handler = logger.add(messages.append, level="WARNING")
    async with Sandbox("unsafe-subprocess", num_jails=1, num_warm=1) as own:
        logger.remove(handler)
        assert (await own.run("print(input())", stdin="a")).stdout == "a\n"
        assert (await own.run("while True: pass", timeout=0.2)).verdict is Verdict.TIMEOUT
        assert (await own.run("import os; print(os.environ['HOME'])")).stdout.startswith("/tmp/unsafe")
        async with own.session() as session:
            assert (await session.run("1 + 1")).value == "2"
    assert any("isolates nothing" in str(message) for message in messages)
