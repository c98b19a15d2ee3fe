"""I3 across a resume: the stream goes on at the cut, nothing is lost, nothing is trained on twice."""

import asyncio

import numpy as np
import pytest

from prime_rl.configs.shared import CkptConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.checkpoint import Cut, read_cut, write_cut
from prime_rl.run import checkpoints
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.rewind import next_branch, rewind
from tests.support.fake_engine import fake_engine, play_trainer, publish_version
from tests.unit.orchestrator.test_orchestrator import STEPS, batches, make_config, metrics, run_orchestrator, samples

in_loop = pytest.mark.asyncio(loop_scope="session")
__all__ = ["run_orchestrator"]  # a fixture

CUT = 4


def commit(paths, step, branch=0):
    """What the trainer does when it has saved its part."""
    checkpoint = paths.checkpoint(step)
    temporary = checkpoints.clear_unfinished(checkpoint, checkpoints.TRAINER)
    checkpoints.seal_part(temporary, checkpoint / checkpoints.TRAINER, {}, {})
    checkpoints.commit_checkpoint(checkpoint, branch, [checkpoints.TRAINER, checkpoints.ORCHESTRATOR], "")


async def resuming_trainer(paths, steps, stop, delay_s):
    """Go back to the checkpoint, while the orchestrator waits; then go on."""
    found = checkpoints.find_checkpoints(paths.checkpoints_dir).complete
    branch = next_branch(paths.checkpoints_dir, found[-1])
    await asyncio.sleep(0.2)  # so that an orchestrator that does not wait would find the old branch
    rewind(paths, paths.checkpoints_dir, found[-1].step, branch, weights=True, rollouts=True)
    publish_version(paths, found[-1].step, branch)
    await play_trainer(paths, steps, stop, delay_s, found[-1].step, branch)


def with_ckpt(config, **keys):
    return config.model_copy(update={"ckpt": CkptConfig(interval=CUT, **keys)})


def examples(paths):
    """What was trained on: position and prompt of every rollout."""
    rows = [row for step in range(STEPS) for row in samples(paths, step)]
    return sorted((row["group_id"], row["messages"][0]["content"]) for row in rows)


def told(paths):
    return [group for _, manifest in batches(paths) for group in manifest["group_ids"]]


@in_loop
@pytest.mark.parametrize("async_level", [0, 2])
async def test_a_resume_goes_on_at_the_cut(tmp_path, tokenizer_dir, run_orchestrator, async_level):
    """Six batches were shipped; the run goes back to four, and ships the others anew, on a branch of its own."""
    config = make_config(tmp_path, tokenizer_dir, async_level=async_level)
    rng = np.random.default_rng(0)

    async def gate(_):
        await asyncio.sleep(rng.exponential(0.01))

    async with fake_engine() as engine:
        engine.gate = gate
        paths = await run_orchestrator(with_ckpt(config), [engine])
        before, first = told(paths), examples(paths)
        assert steps_in(paths.checkpoints_dir) == [CUT, STEPS], "every interval, and the last step"
        commit(paths, CUT)
        await run_orchestrator(with_ckpt(config, resume_step=-1), [engine], trainer=resuming_trainer)
        assert (engine.branch, engine.step) == (1, STEPS)
    assert sorted(told(paths)) == list(range(STEPS * 3)), "every position of the stream once"
    assert told(paths)[: CUT * 3] == before[: CUT * 3]
    if async_level == 0:
        assert told(paths) == before
        assert examples(paths) == first
    for step, (batch, manifest) in enumerate(batches(paths)):
        assert manifest["branch"] == int(step >= CUT)
        assert step - batch.versions[batch.loss_mask == 1].min() <= async_level
    assert [line["step"] for line in metrics(paths)] == list(range(STEPS))
    assert steps_in(paths.abandoned(0) / "rollouts") == list(range(CUT, STEPS))


@in_loop
async def test_finished_groups_are_not_played_again(tmp_path, tokenizer_dir, run_orchestrator):
    """What was finished ahead of its batch is in the cut in full, and ships with its own deadline."""
    config = with_ckpt(make_config(tmp_path, tokenizer_dir, async_level=2))
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
        cut = read_cut(paths.checkpoint(CUT), config) if commit(paths, CUT) is None else None
        played = len(engine.requests)
        resumed = config.model_copy(update={"ckpt": CkptConfig(interval=CUT, resume_step=CUT)})
        await run_orchestrator(resumed, [engine], trainer=resuming_trainer)
        again = len(engine.requests) - played
    assert again == ((STEPS - CUT) * 3 - len(cut.finished)) * 2
    assert sorted(told(paths)) == list(range(STEPS * 3))


@pytest.fixture
def cut(tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    base = {"stream": {}, "positions": {"cursor": 9, "next_step": 3, "open": [[7, 0, 1, 2, 4], [8, 0, 2, None, None]]}}
    return Cut(3, base, [], {}), manifest


def test_what_is_written_is_read(tmp_path, tokenizer_dir, cut):
    config, paths = make_config(tmp_path, tokenizer_dir), RunPaths(tmp_path)
    write_cut(paths.checkpoint(3), cut[0], 0, cut[1], config)
    commit(paths, 3)
    read = read_cut(paths.checkpoint(3), config)
    assert read == cut[0]
    assert [draw.group_id for draw in read.unfinished] == [7] and [draw.group_id for draw in read.waiting] == [8]


@pytest.mark.parametrize(("key", "value"), [("batch_size", 12), ("rollouts_per_example", 3), ("async_level", 1)])
def test_other_sizes_are_refused(tmp_path, tokenizer_dir, cut, key, value):
    config, paths = make_config(tmp_path, tokenizer_dir), RunPaths(tmp_path)
    write_cut(paths.checkpoint(3), cut[0], 0, cut[1], config)
    commit(paths, 3)
    with pytest.raises(ConfigError, match=f"{key} = {value}, but .*step_3 was written with"):
        read_cut(paths.checkpoint(3), config.model_copy(update={key: value}))


def test_damage_is_named(tmp_path, tokenizer_dir, cut):
    config, paths = make_config(tmp_path, tokenizer_dir), RunPaths(tmp_path)
    write_cut(paths.checkpoint(3), cut[0], 0, cut[1], config)
    commit(paths, 3)
    state = paths.checkpoint(3) / "orchestrator/state.json"
    state.write_bytes(bytes([state.read_bytes()[0] ^ 1]) + state.read_bytes()[1:])
    with pytest.raises(ArtifactError, match=f"{state} is damaged"):
        read_cut(paths.checkpoint(3), config)


def test_a_trainers_own_checkpoint_is_refused(tmp_path, tokenizer_dir):
    paths = RunPaths(tmp_path)
    temporary = checkpoints.clear_unfinished(paths.checkpoint(3), checkpoints.TRAINER)
    checkpoints.seal_part(temporary, paths.checkpoint(3) / checkpoints.TRAINER, {}, {})
    checkpoints.commit_checkpoint(paths.checkpoint(3), 0, [checkpoints.TRAINER], "")
    with pytest.raises(ConfigError, match="without an orchestrator"):
        read_cut(paths.checkpoint(3), make_config(tmp_path, tokenizer_dir))


@in_loop
async def test_a_trainer_that_does_not_resume_is_named(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, wait_timeout_seconds=0.5, ckpt=CkptConfig(resume_step=-1))

    async def no_trainer(paths, steps, stop, delay_s):
        await stop.wait()

    async with fake_engine() as engine:
        with pytest.raises(RunError, match=r"waited 0 s for the trainer .*trainer.log"):
            await run_orchestrator(config, [engine], trainer=no_trainer)
