"""The installed command with a server but without a trainer."""

import asyncio
import json
from pathlib import Path

import pytest

from prime_rl.storage.paths import RunPaths, steps_in

from ...support.command import clean_environment, executable
from ...support.fake_engine import fake_engine

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.extended)])
async def test_debug_configuration_without_a_trainer_ends_with_0_each_time(tmp_path, times):
    async with fake_engine() as engine:
        command = [
            executable("orchestrator"), "@", "configs/orchestrator/debug.toml",
            "--client.base-url", engine.url, "--output-dir", str(tmp_path),
        ]  # fmt: skip
        for _ in range(times):
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=clean_environment(), stderr=asyncio.subprocess.PIPE
            )
            _, errors = await asyncio.wait_for(process.communicate(), 240)
            assert process.returncode == 0, errors.decode()
            paths = RunPaths(tmp_path)
            lines = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
            assert steps_in(paths.rollouts_dir) == [0, 1]
            assert [line["step"] for line in lines if "reward/mean" in line] == [0, 1]
