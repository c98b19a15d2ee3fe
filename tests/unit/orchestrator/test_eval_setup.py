"""Start of the online evaluations, with real workers."""

from contextlib import AsyncExitStack

import pytest

from prime_rl.configs.rollouts.eval_common import EvalEnvConfig
from prime_rl.configs.rollouts.online_eval import OnlineEvalConfig, ValConfig
from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.orchestrator.online_eval.eval_setup import start_schedules
from prime_rl.orchestrator.orchestrator_setup import model_access
from prime_rl.storage.paths import RunPaths
from tests.unit.orchestrator.test_orchestrator import make_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def start(tmp_path, tokenizer_dir, host):
    """Coroutine: start the evaluations of a configuration; return the size of each environment."""

    async def run(**values):
        config = make_config(tmp_path, tokenizer_dir, **values)
        async with AsyncExitStack() as stack:
            paths = RunPaths(config.output_dir)
            schedules = await start_schedules(config, host, model_access(config), paths, stack)
            sizes = {schedule.prefix: [len(pool) for _, pool in schedule.tasks] for schedule in schedules}
            workers = [len(pool._workers) for schedule in schedules for _, pool in schedule.tasks]
        return sizes, workers

    return run


async def test_val_without_evaluation_split_raises(start):
    with pytest.raises(ConfigError, match="val: environment 'toy_environment' has no evaluation split"):
        await start(val=ValConfig())


async def test_val_with_evaluation_split_uses_its_examples(start):
    sizes, workers = await start(env_args={"eval_examples": 5}, val=ValConfig(), workers_per_env=2)
    assert sizes == {"val": [5]}
    assert workers == [2], "workers_per_env"


async def test_val_one_environment_without_evaluation_split_is_named(start):
    envs = [
        EnvConfig(id="toy_environment", name="good", args={"eval_examples": 5}),
        EnvConfig(id="toy_environment", name="bad"),
    ]
    with pytest.raises(ConfigError, match="environment 'bad' has no evaluation split"):
        await start(env=envs, val=ValConfig())


async def test_eval_without_evaluation_split_warns(start, said):
    played = [EvalEnvConfig(id="toy_environment", name="few", args={"eval_examples": 3})]
    sizes, _ = await start(eval=OnlineEvalConfig(env=[*played, EvalEnvConfig(id="toy_environment", name="all")]))
    assert sizes == {"eval": [3, 12]}
    warned = [line for line in said() if "no evaluation split" in line]
    assert len(warned) == 1
    assert "environment all " in warned[0]
