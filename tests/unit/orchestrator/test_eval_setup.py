"""Start of the online evaluations, with real workers; the name of the run's slot."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.online_eval import OnlineEvalConfig, ValConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.orchestrator.orchestrator_setup import model_access, name_slot, start_schedules
from prime_rl.storage.paths import RunPaths
from tests.unit.orchestrator.loop_runs import make_config, toy

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def start(tmp_path, tokenizer_dir, host):
    """Coroutine: start the evaluations of a configuration; return the size and workers of each environment."""

    async def run(**values):
        config = make_config(tmp_path, model={"name": str(tokenizer_dir)}, **values)
        async with AsyncExitStack() as stack:
            schedules = await start_schedules(config, host, model_access(config), stack)
            return {
                schedule.prefix: [(len(pool), len(pool._workers)) for _, pool in schedule.tasks]
                for schedule in schedules
            }

    return run


async def test_val_uses_the_evaluation_split_and_refuses_an_environment_without_one(start):
    good = toy("good", eval_examples=5)
    assert await start(env=[good], val=ValConfig(), workers_per_env=2) == {"val": [(5, 2)]}
    with pytest.raises(ConfigError, match="val: environment 'bad' has no evaluation split"):
        await start(env=[good, toy("bad")], val=ValConfig())


async def test_eval_without_evaluation_split_warns(start, said):
    few = EvalEnvConfig(id="toy_environment", name="few", args={"eval_examples": 3})
    started = await start(eval=OnlineEvalConfig(env=[few, EvalEnvConfig(id="toy_environment", name="all")]))
    assert started == {"eval": [(3, 1), (12, 1)]}
    (warned,) = [line for line in said() if "no evaluation split" in line]
    assert "environment all " in warned


@pytest.mark.parametrize(("folder", "rank", "expected"), [("one run", 8, "one_run"), ("run", None, None)])
async def test_slot_is_named_after_the_run_of_a_trainer_of_adapters(tmp_path, tokenizer_dir, folder, rank, expected):
    model = {"name": str(tokenizer_dir)}
    config = make_config(tmp_path, model=model, output_dir=tmp_path / folder)
    given = make_config(tmp_path, model=model | {"lora": {"name": "given"}})
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
async def test_slot_is_named_after_one_of_several_runs(tmp_path, trainer, folder, expected):
    """It may start before the trainer gives it a slot; without a trainer it samples from the server's own policy."""
    (file := RunPaths(tmp_path).config("trainer")).parent.mkdir()
    file.write_text(trainer)
    config = make_config(tmp_path, output_dir=tmp_path / folder, wait_for_final_version=False)
    assert name_slot(config).model.lora.name == expected


@pytest.mark.parametrize(("place", "expected"), [("", "run_a"), ("run_a", None)])
async def test_slot_waits_for_a_trainer_that_starts_later(tmp_path, said, place, expected):
    """A trainer of several runs above the folder, or one that publishes merged weights in it."""
    config = make_config(tmp_path, output_dir=tmp_path / "run_a")
    naming = asyncio.create_task(asyncio.to_thread(name_slot, config))
    await asyncio.sleep(0.1)
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
