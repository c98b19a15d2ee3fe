"""The installed command with a server but without a trainer."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.storage.paths import RunPaths, steps_in
from tests.support.command import clean_environment, executable
from tests.support.fake_engine import fake_engine
from tests.unit.orchestrator.loop_runs import metrics

ROOT = Path(__file__).parents[3]


@pytest.mark.extended
@pytest.mark.slow
async def test_debug_configuration_without_a_trainer_ends_with_0_each_time(tmp_path):
    async with fake_engine() as engine:
        command = [
            executable("orchestrator"), "@", "configs/orchestrator/debug.toml",
            "--client.base-url", engine.url, "--output-dir", str(tmp_path),
        ]  # fmt: skip
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=clean_environment(), stderr=asyncio.subprocess.PIPE
            )
            _, errors = await asyncio.wait_for(process.communicate(), 240)
            assert process.returncode == 0, errors.decode()
            paths = RunPaths(tmp_path)
            assert steps_in(paths.rollouts_dir) == [0, 1]
            assert [line["step"] for line in metrics(paths) if "reward/mean" in line] == [0, 1]
