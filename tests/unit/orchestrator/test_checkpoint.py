"""Resume from a checkpoint: the stream continues, and every position is trained on exactly once (I3)."""

import asyncio
from dataclasses import replace

import pytest

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.orchestrator import resume
from prime_rl.orchestrator.example_stream import ExampleStream, StreamEnvironment
from prime_rl.orchestrator.ledger.ledger import read_ledger, replay
from prime_rl.orchestrator.ledger.ledger_records import Positions
from prime_rl.orchestrator.resume import (
    OrchestratorState,
    find_start_point,
    read_checkpoint_part,
    write_checkpoint_part,
)
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.batch import read_batch
from prime_rl.storage.checkpoint_artifacts import ORCHESTRATOR, StopRecord, find_checkpoints, write_stop
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.rollback import next_branch, roll_back
from tests.support.fake_engine import play_trainer, publish_version
from tests.unit.orchestrator.loop_runs import (
    STEPS,
    batches,
    check_bound,
    check_progress,
    commit,
    group_ids,
    json_lines,
    make_config,
    metrics,
    random_pauses,
    run_orchestrator,
    samples,
    until,
    with_ckpt,
)

CUT = 4


async def resuming_trainer(paths, steps, stop, delay_seconds):
    """Roll back to the checkpoint while the orchestrator waits, then continue."""
    found = find_checkpoints(paths.checkpoints_dir).complete
    branch = next_branch(paths.checkpoints_dir, found[-1])
    await asyncio.sleep(0.1)  # so that an orchestrator that does not wait would find the old branch
    roll_back(paths, paths.checkpoints_dir, found[-1].step, branch, weights=True, rollouts=True)
    publish_version(paths, found[-1].step, branch)
    await play_trainer(paths, steps, stop, delay_seconds, found[-1].step, branch)


@pytest.mark.parametrize("async_level", [0, 2])
async def test_resume_continues_at_the_checkpoint(tmp_path, async_level, engine):
    """Six batches were shipped; the run rolls back to four and ships the others again on a new branch."""
    config = make_config(tmp_path, async_level=async_level)
    engine.gate = random_pauses(0.01)
    paths = await run_orchestrator(with_ckpt(config), [engine])
    before, examples = group_ids(paths), [row["example"] for row in samples(paths, *range(STEPS))]
    assert steps_in(paths.checkpoints_dir) == [CUT, STEPS], "every interval, and the last step"
    commit(paths, CUT)
    finished = read_checkpoint_part(paths.checkpoint(CUT), config).finished
    engine.requests.clear()
    await run_orchestrator(with_ckpt(config, resume_step=-1), [engine], trainer=resuming_trainer)
    assert (engine.branch, engine.step) == (1, STEPS)
    assert len(engine.requests) == ((STEPS - CUT) * 3 - len(finished)) * 2, "finished groups are not sampled again"
    assert sorted(group_ids(paths)) == list(range(STEPS * 3)), "every position of the stream once"
    assert group_ids(paths)[: CUT * 3] == before[: CUT * 3]
    if async_level == 0:
        assert group_ids(paths) == before
        assert [row["example"] for row in samples(paths, *range(STEPS))] == examples
    assert [manifest["branch"] for _, manifest in batches(paths)] == [0] * CUT + [1] * (STEPS - CUT)
    check_bound(paths, async_level)
    check_progress(paths)
    assert steps_in(paths.abandoned(0) / "rollouts") == list(range(CUT, STEPS))


STOPPED_AT = 3


@pytest.mark.parametrize("is_signalled", [False, True])
async def test_stop_between_two_checkpoints_resumes_with_every_position_once(tmp_path, is_signalled, engine):
    """The trainer names the step in STOP.json; or the orchestrator gets SIGTERM first and writes all possible parts."""
    config = with_ckpt(make_config(tmp_path, async_level=2))
    paths, published = RunPaths(config.output_dir), asyncio.Event()
    part = paths.checkpoint(STOPPED_AT) / ORCHESTRATOR

    async def stopping_trainer(paths, steps, stop, delay_seconds):
        await play_trainer(paths, STOPPED_AT, stop, delay_seconds)
        published.set()

    run = asyncio.create_task(run_orchestrator(config, [engine], trainer=stopping_trainer))
    await asyncio.wait_for(published.wait(), 60)
    if not is_signalled:
        write_stop(paths.checkpoints_dir, StopRecord(STOPPED_AT, 0))
        await until(part.exists)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert part.exists()
    assert engine.holder is None, "the lease is given back"
    before = group_ids(paths, STOPPED_AT)
    commit(paths, STOPPED_AT)
    await run_orchestrator(with_ckpt(config, resume_step=-1), [engine], trainer=resuming_trainer)
    assert group_ids(paths)[: STOPPED_AT * 3] == before
    assert sorted(group_ids(paths)) == list(range(STEPS * 3)), "every position of the stream once"


@pytest.mark.extended(after=3)
@pytest.mark.parametrize(
    "changes",
    [
        {"async_level": 0, "batch_size": 2, "seq_len": 7},
        {"async_level": 3, "max_off_policy_steps": 4},
        {"rollouts_per_example": 3, "max_steps": CUT + 1},
        {"async_level": 0},
        {"async_level": 1, "max_off_policy_steps": 1},
        {"batch_size": 4},
        {"batch_size": 12},
    ],
    ids=str,
)
async def test_resume_other_settings_trains_every_position_once(tmp_path, changes, engine):
    config = with_ckpt(make_config(tmp_path, async_level=2, max_off_policy_steps=3))
    engine.gate = random_pauses(0.01)
    paths = await run_orchestrator(config, [engine])
    trained = before = group_ids(paths, CUT)
    commit(paths, CUT)
    resumed = with_ckpt(config, resume_step=CUT).model_copy(update=changes)
    await run_orchestrator(resumed, [engine], trainer=resuming_trainer)
    [reported] = [line["text"] for line in json_lines(paths.warnings) if line["kind"] == "resume"]
    shown = [f"{key} {getattr(config, key)} -> {value}" for key, value in changes.items() if key != "max_steps"]
    assert all(change in reported for change in shown) and reported.count("->") == len(shown)
    count = resumed.rollouts_per_example
    for step in range(CUT, resumed.max_steps):
        batch, manifest = read_batch(paths.rollouts(step), step)
        trained = trained + manifest["group_ids"]
        assert step - batch.versions[batch.loss_mask == 1].min() <= resumed.max_staleness
        assert len(set(zip(batch.sample_group, batch.sample_rollout, strict=True))) == resumed.batch_size
        assert set(batch.sample_rollout) == set(range(count)), "no group of another size"
        assert batch.seq_lens.max() <= resumed.seq_len
    assert len(trained) == len(set(trained)), "no position twice"
    assert len(trained) - len(before) == (resumed.max_steps - CUT) * resumed.batch_size // count
    if resumed.max_steps == STEPS and resumed.batch_size * 3 >= 18:
        assert set(range(max(before))) <= set(trained), "none is left behind"
    last = metrics(paths)[-1]
    assert last["tokens/unaccounted"] == 0
    assert last["tokens/sampled"] >= last["tokens/shipped"] > 0


async def test_resume_another_mixture_and_restart_train_every_position_once(tmp_path, engine):
    """An environment is added and a weight changed at a resume; the ledger of the new branch then replays."""
    config = with_ckpt(make_config(tmp_path, async_level=1))
    (first,) = config.env
    paths = await run_orchestrator(config, [engine])
    before = group_ids(paths, CUT)
    commit(paths, CUT)
    env = [first, first.model_copy(update={"name": "added", "weight": 2.0})]
    resumed = with_ckpt(config, resume_step=CUT).model_copy(update={"env": env})
    await run_orchestrator(resumed, [engine], trainer=resuming_trainer)
    trained = group_ids(paths)
    assert trained[: CUT * 3] == before
    assert len(set(trained)) == len(trained) == STEPS * 3
    assert {row["env"] for row in samples(paths, *range(CUT, STEPS))} == {"toy_environment", "added"}
    stream = ExampleStream([StreamEnvironment("toy_environment", 12), StreamEnvironment("added", 12, 2.0)], config.seed)
    replay(stream, read_ledger(paths, 1))


@pytest.fixture
def part(tmp_path):
    """The state of a part, a function that commits it as checkpoint 3, and the configuration of the run."""
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    config, paths = make_config(tmp_path), RunPaths(tmp_path)
    base = {"stream": {}, "positions": {"cursor": 9, "next_step": 3, "open": [[7, 0, 1, 2, 4], [8, 0, 2, None, None]]}}

    def write(state):
        write_checkpoint_part(paths.checkpoint(3), state, 0, manifest, config)
        commit(paths, 3)
        return paths.checkpoint(3)

    return OrchestratorState(3, base, [], {}), write, config


def test_read_checkpoint_part_changed_settings_are_named(part):
    state, write, config = part
    checkpoint = write(state)
    env = config.env[0].model_copy(update={"reward_errors": "zero", "args": {"examples": 5}})
    sampling = config.sampling.model_copy(update={"temperature": 0.5})
    changed = {"batch_size": 12, "sampling": sampling, "env": [env], "seed": 9}
    read = read_checkpoint_part(checkpoint, config.model_copy(update=changed))
    assert read == replace(state, changes=read.changes)
    positions = Positions(read.base["positions"])
    assert [draw.group_id for draw in positions.unfinished] == [7]
    assert [draw.group_id for draw in positions.waiting] == [8]
    said = read.describe_changes()
    assert said.startswith("resumed after step 2; changed: ") and said.count("->") == 4
    assert {"batch_size 6 -> 12", "sampling.temperature 1.0 -> 0.5"} < set(said.partition("changed: ")[2].split(", "))
    assert "environment toy_environment.args {} -> {'examples': 5}" in said
    assert "environment toy_environment.reward_errors drop -> zero" in said


def test_read_checkpoint_part_of_an_earlier_release(part, monkeypatch):
    """It has three settings, and the lengths of its groups in tokens, which are not compared with seconds."""
    monkeypatch.setattr(resume, "_HISTORY", "lengths")
    monkeypatch.setattr(resume, "_REPORTED", ("async_level", "batch_size", "rollouts_per_example"))
    monkeypatch.setattr(resume, "_REPORTED_OF_ENV", {"id"})
    state, write, config = part
    checkpoint = write(replace(state, history={"toy_environment": {"mean": [900.0, 3], "examples": []}}))
    monkeypatch.undo()
    read = read_checkpoint_part(checkpoint, config.model_copy(update={"async_level": 0}))
    assert read == replace(state, history={}, changes=(f"async_level {config.async_level} -> 0",))


def test_read_checkpoint_part_damaged_or_missing_raises(part, tmp_path):
    state, write, config = part
    file = write(state) / "orchestrator/state.json"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(ArtifactError, match=f"{file} is damaged"):
        read_checkpoint_part(file.parents[1], config)
    commit(RunPaths(tmp_path), 4, others=())
    with pytest.raises(ConfigError, match="without an orchestrator"):
        read_checkpoint_part(RunPaths(tmp_path).checkpoint(4), config)


def test_find_start_point_trainer_does_not_resume_is_named(tmp_path):
    config = with_ckpt(make_config(tmp_path, wait_timeout_seconds=0.1), resume_step=-1)
    with pytest.raises(RunError, match=r"waited 0 s for the trainer"):
        find_start_point(config)
