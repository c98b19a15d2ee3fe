"""Start of the online evaluations, with real workers."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from prime_rl.configs.environment import EnvConfig, EvalEnvConfig
from prime_rl.configs.online_eval import OnlineEvalConfig, ValConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.orchestrator.orchestrator_setup import model_access, name_slot, start_schedules
from prime_rl.storage.paths import RunPaths
from tests.unit.orchestrator.test_orchestrator import make_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def start(tmp_path, tokenizer_dir, host):
    """Coroutine: start the evaluations of a configuration; return the size of each environment."""

    async def run(**values):
        config = make_config(tmp_path, tokenizer_dir, **values)
        async with AsyncExitStack() as stack:
            schedules = await start_schedules(config, host, model_access(config), stack)
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


@pytest.mark.extended
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


@pytest.mark.parametrize(("folder", "rank", "expected"), [("one run", 8, "one_run"), ("run", None, None)])
async def test_slot_is_named_after_the_run_of_a_trainer_of_adapters(tmp_path, tokenizer_dir, folder, rank, expected):
    config = make_config(tmp_path, tokenizer_dir, output_dir=tmp_path / folder)
    given = make_config(tmp_path, tokenizer_dir, model={"name": str(tokenizer_dir), "lora": {"name": "given"}})
    assert name_slot(config).model.lora.name is None
    with HeartbeatWriter(config.run_paths, "trainer_0", "trainer", settings={"model.lora.rank": rank}):
        named = name_slot(config)
    assert (named.model.lora.name, name_slot(given).model.lora.name) == (expected, "given")
    assert model_access(named).model == (expected or str(tokenizer_dir))


@pytest.mark.parametrize(
    ("trainer", "folder", "expected"),
    [
        ("max_concurrent_runs = 2", "run_a", "run_a"),
        ("max_concurrent_runs = 2", "a", None),
        ("max_concurrent_runs = 1", "run_a", None),
        ("", "run_a", None),
        ("max_concurrent_ru", "run_a", None),
    ],
)
async def test_slot_is_named_after_one_of_several_runs(tmp_path, tokenizer_dir, trainer, folder, expected):
    """It may start before the trainer gives it a slot; without a trainer it samples from the server's own policy."""
    (file := RunPaths(tmp_path).config("trainer")).parent.mkdir()
    file.write_text(trainer)
    config = make_config(tmp_path, tokenizer_dir, output_dir=tmp_path / folder, wait_for_final_version=False)
    assert name_slot(config).model.lora.name == expected


@pytest.mark.parametrize(("place", "expected"), [("", "run_a"), ("run_a", None)])
async def test_slot_waits_for_a_trainer_that_starts_later(tmp_path, tokenizer_dir, said, place, expected):
    """A trainer of several runs above the folder, or one that publishes merged weights in it."""
    config = make_config(tmp_path, tokenizer_dir, output_dir=tmp_path / "run_a")
    naming = asyncio.create_task(asyncio.to_thread(name_slot, config))
    await asyncio.sleep(0.2)
    assert not naming.done()
    assert any(line.startswith(f"waiting for a trainer in {tmp_path} or ") for line in said())
    if place:
        with HeartbeatWriter(config.run_paths, "trainer_0", "trainer", 0.1, settings={"model.lora.rank": None}):
            named = await naming
    else:
        (file := RunPaths(tmp_path).config("trainer")).parent.mkdir()
        file.write_text("max_concurrent_runs = 2")
        named = await naming
    assert named.model.lora.name == expected
