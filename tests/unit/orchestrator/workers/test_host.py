"""What becomes of workers when main goes away without a word."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from prime_rl.configs.shared import EnvConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.workers import host
from prime_rl.orchestrator.workers.pool import EnvironmentPool, ModelAccess


def test_workers_do_not_outlive_a_killed_main(packages, tokenizer_dir):
    script = f"""
    import asyncio
    from prime_rl.configs.shared import EnvConfig
    from prime_rl.orchestrator.workers.host import WorkerHost
    from prime_rl.orchestrator.workers.pool import EnvironmentPool, ModelAccess

    async def main():
        async with WorkerHost() as host:
            access = ModelAccess("m", {str(tokenizer_dir)!r})
            async with EnvironmentPool(EnvConfig(id="troubled_environment"), host, access) as pool:
                print(host._server.pid, pool._workers[0]._process.pid, flush=True)
                await asyncio.Event().wait()

    asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    main = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env=environment, text=True
    )
    line = main.stdout.readline()
    assert re.fullmatch(r"\d+ \d+\n", line)
    processes = [psutil.Process(int(number)) for number in line.split()]
    main.kill()
    main.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_main_itself_never_imports_what_only_environments_need():
    code = "import sys, prime_rl.orchestrator.setup; print([m for m in ('verifiers', 'datasets') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


async def test_a_fork_server_that_always_dies_is_not_started_for_ever(monkeypatch):
    monkeypatch.setattr(host, "_SERVER", "no_such_module")
    async with asyncio.timeout(60), host.WorkerHost() as workers:
        with pytest.raises(RunError, match=r"died 5 times in a row; .* -m no_such_module 0` says why"):
            await workers.start(None)


async def test_a_fork_server_that_is_stopped_is_told_at_the_deadline_and_keeps_nobody(monkeypatch):
    monkeypatch.setattr(host, "_CLOSE_S", 0.2)
    config = EnvConfig(id="troubled_environment", start_timeout=0.2)
    async with asyncio.timeout(60), host.WorkerHost() as workers:
        os.kill(workers._server.pid, signal.SIGSTOP)
        pool = EnvironmentPool(config, workers, ModelAccess("m", "no tokenizer is looked for"))
        with pytest.raises(RunError, match=r"got no worker .* within 0 s \(env\.start_timeout\)"):
            await pool.start()


def test_how_long_workers_may_be_silent_is_configured():
    pool = EnvironmentPool(EnvConfig(id="x", start_timeout=5, silence_timeout=7), None, ModelAccess("m", "t"))
    assert (pool._patience.start_s, pool._patience.silence_s, pool._patience.group_s) == (5, 7, None)
