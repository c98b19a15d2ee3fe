"""What becomes of workers when main goes away without a word."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.api_key import withheld_from_environments
from prime_rl.core.errors import RunError
from prime_rl.rollouts.workers import worker_launcher
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess


@pytest.fixture(autouse=True)
def started_fork_server(monkeypatch):
    """These tests start it as a run does, with a new interpreter."""
    monkeypatch.setattr(worker_launcher, "subprocess", subprocess)


@pytest.mark.extended
def test_workers_inherit_no_withheld_variable_and_exit_when_main_is_killed(packages, tokenizer_dir):
    """The variable is neither in the environment nor in the kernel's copy of the first environment."""
    script = f"""
    import asyncio
    from prime_rl.configs.environment import EnvConfig
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
    from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
    from prime_rl.rollouts.workers.protocol import ModelAccess

    async def main():
        async with WorkerLauncher(["INFERENCE_SERVER_API_KEY", "OUR_KEY"]) as host:
            access = ModelAccess("m", {str(tokenizer_dir)!r})
            async with EnvironmentPool(EnvConfig(id="troubled_environment"), host, access) as pool:
                print(host._server.pid, pool._workers[0]._process.pid, flush=True)
                await asyncio.Event().wait()

    asyncio.run(main())
    """
    keys = {name: f"value of {name}" for name in ("INFERENCE_SERVER_API_KEY", "OUR_KEY", "JUDGE_API_KEY")}
    environment = {**os.environ, **keys, "PYTHONPATH": str(packages)}
    main = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env=environment, text=True
    )
    line = main.stdout.readline()
    assert re.fullmatch(r"\d+ \d+\n", line)
    processes = [psutil.Process(int(number)) for number in line.split()]
    for process in processes:
        inherited = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"JUDGE_API_KEY=value of JUDGE_API_KEY" in inherited
        assert b"INFERENCE_SERVER_API_KEY" not in inherited and b"OUR_KEY" not in inherited
    main.kill()
    main.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_main_does_not_import_environment_dependencies():
    code = "import sys, prime_rl.orchestrator.orchestrator_setup; assert not {'verifiers', 'datasets'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


async def test_fork_server_that_always_dies_raises(monkeypatch):
    monkeypatch.setattr(worker_launcher, "_SERVER", "no_such_module")
    async with asyncio.timeout(120), worker_launcher.WorkerLauncher() as workers:
        with pytest.raises(RunError, match=r"died 5 times in a row; .* -m no_such_module 0` to see its error"):
            await workers.start(None)


async def test_stopped_fork_server_raises_at_the_timeout(monkeypatch):
    monkeypatch.setattr(worker_launcher, "_CLOSE_SECONDS", 0.2)
    config = EnvConfig(id="troubled_environment", start_timeout_seconds=0.2)
    async with asyncio.timeout(120), worker_launcher.WorkerLauncher() as workers:
        os.kill(workers._server.pid, signal.SIGSTOP)
        pool = EnvironmentPool(config, workers, ModelAccess("m", "no tokenizer is looked for"))
        with pytest.raises(RunError, match=r"got no worker .* within 0 s \(env\.start_timeout_seconds\)"):
            await pool.start()


@pytest.mark.parametrize(
    ("keys", "withheld"),
    [
        ([], {"INFERENCE_SERVER_API_KEY"}),
        (["--client.api-key-var", "OUR_KEY"], {"INFERENCE_SERVER_API_KEY", "OUR_KEY"}),
        (["--client.api-key-var", "OUR_KEY", "--env.args.judge_key_var", "OUR_KEY"], {"INFERENCE_SERVER_API_KEY"}),
        (["--env.args.judge", "{'var': ['INFERENCE_SERVER_API_KEY']}"], set()),
        (["--env.id", "x", "--env.name", "INFERENCE_SERVER_API_KEY"], {"INFERENCE_SERVER_API_KEY"}),
        (["--eval.env.0.id", "x", "--eval.env.0.args.key", "INFERENCE_SERVER_API_KEY"], set()),
    ],
)
def test_orchestrator_withholds_the_key_of_its_servers_unless_an_environment_names_it(keys, withheld):
    config = OrchestratorConfig.load(keys)
    assert withheld_from_environments([config.client.api_key_var], config.model_dump()) == withheld | {"RELAY_API_KEY"}
