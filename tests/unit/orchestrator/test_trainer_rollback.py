"""The running orchestrator follows a trainer that restarts from a checkpoint (I3)."""

import asyncio
import json

import pytest

from prime_rl.core.errors import RunError
from prime_rl.orchestrator import resume
from prime_rl.orchestrator.orchestrator import OrchestratorLoop
from prime_rl.orchestrator.resume import StartPoint, TrainerRolledBack, find_rollback, find_start_point
from prime_rl.storage.checkpoint_artifacts import ResumeRecord, find_checkpoints, read_resume, write_resume
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.rollback import START_VARIABLE, archive_late_artifacts, branch_of_batch, next_branch, roll_back
from prime_rl.storage.wait_for import watch_directory
from tests.support.fake_engine import publish_version
from tests.unit.orchestrator.loop_runs import (
    STEPS,
    batches,
    check_bound,
    commit,
    group_ids,
    make_config,
    metrics,
    run_loop,
    until,
    with_ckpt,
    with_engines,
)

EVERY = 2
"""Steps between two checkpoints."""


class MortalTrainer:
    """A trainer without a model, which exits before the given steps and resumes as after a restart.

    Attributes:
        trained: (branch, step, group_ids) of every batch that was trained on, in order.
    """

    def __init__(self, paths, deaths, ckpt):
        """Exit before each of the steps in `deaths`."""
        self.trained = []
        self._paths, self._deaths, self._ckpt = paths, list(deaths), ckpt

    async def __call__(self, stop):
        done, branch = 0, 0
        while done < STEPS:
            if self._deaths and done == self._deaths[0]:
                self._deaths.pop(0)
                done, branch = await self._go_back()
            if await self._batch(done, branch, stop):
                return
            manifest = json.loads((self._paths.rollouts(done) / "manifest.json").read_text())
            self.trained.append((branch, done, manifest["group_ids"]))
            publish_version(self._paths, done + 1, branch)
            done += 1
            if self._ckpt and (done % EVERY == 0 or done == STEPS):
                commit(self._paths, done, branch)
        stop.set()

    async def _batch(self, step, branch, stop):
        async for _ in watch_directory(self._paths.rollouts_dir, stop):
            if branch_of_batch(self._paths.rollouts(step)) == branch:
                return False
        return True

    async def _go_back(self):
        """Some time after the exit: the orchestrator continues up to the bound, and a last batch is late."""
        paths = self._paths
        await asyncio.sleep(0.1)
        found = find_checkpoints(paths.checkpoints_dir).complete
        last = found[-1] if found else None
        branch = next_branch(paths.checkpoints_dir, last)
        step = last.step if last else 0
        roll_back(paths, paths.checkpoints_dir, step, branch, weights=True, rollouts=True)
        if step:
            publish_version(paths, step, branch)
        return step, branch


async def run_on(config, engine, trainer):
    """Run an orchestrator as `orchestrate` does: start again after each rollback. Return where it started."""
    config = with_engines(config, [engine])
    stop, started = asyncio.Event(), []
    training = asyncio.create_task(trainer(stop))
    try:
        while True:
            started.append(await asyncio.to_thread(find_start_point, config))
            try:
                await run_loop(config, started[-1])
                break
            except TrainerRolledBack:
                assert engine.holder is not None, "no other run gets the server meanwhile"
            config = config.model_copy(update={"restart": True})
        await training
    finally:
        stop.set()
        training.cancel()
    return started


@pytest.mark.parametrize(("ckpt", "deaths", "begins"), [(True, [3, 5, 5], [0, 2, 4, 4]), (False, [2, 1], [0, 0, 0])])
async def test_running_orchestrator_follows_a_rollback(tmp_path, ckpt, deaths, begins, engine):
    """Also if the trainer exits again before any progress, and without checkpoints."""
    config = make_config(tmp_path, async_level=2)
    config = with_ckpt(config, EVERY) if ckpt else config
    paths = RunPaths(config.output_dir)
    trainer = MortalTrainer(paths, deaths, ckpt)
    started = await run_on(config, engine, trainer)
    assert (engine.branch, engine.step) == (len(deaths), STEPS)
    assert [one.state.step if one.state else 0 for one in started] == begins
    assert [one.branch for one in started] == list(range(len(deaths) + 1))
    surviving = {step: (branch, groups) for branch, step, groups in trainer.trained}
    assert [surviving[step] for step in range(STEPS)] == [
        (manifest["branch"], manifest["group_ids"]) for _, manifest in batches(paths)
    ], "what was trained on last is what stays"
    assert sorted(group_ids(paths)) == list(range(STEPS * 3)), "every position of the stream once"
    check_bound(paths, 2)
    assert [line["step"] for line in metrics(paths)] == list(range(STEPS))
    assert [ledger.name for ledger in paths.ledger_dir.iterdir()] == [f"branch_{len(deaths)}.jsonl"]
    assert read_resume(paths.checkpoints_dir).branch == len(deaths)


async def test_rollback_waits_for_a_batch_being_written(tmp_path, monkeypatch, engine):
    """Otherwise the batch would appear in the new branch."""
    config = with_ckpt(make_config(tmp_path, async_level=0))
    paths = RunPaths(config.output_dir)
    whole, loop = OrchestratorLoop._write, asyncio.get_running_loop()
    written, is_seen, rewound = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def slow(self, step, *rest):
        if step == 1 and self._start_point.branch == 0:
            loop.call_soon_threadsafe(written.set)
            asyncio.run_coroutine_threadsafe(rewound.wait(), loop).result()
        return whole(self, step, *rest)

    async def finish(self):
        is_seen.set()
        await finish_writing(self)

    finish_writing = OrchestratorLoop._finish_writing
    monkeypatch.setattr(OrchestratorLoop, "_write", slow)
    monkeypatch.setattr(OrchestratorLoop, "_finish_writing", finish)

    async def back_to_the_start(stop):
        await until(lambda: paths.rollouts(0).exists())
        publish_version(paths, 1)
        await written.wait()
        roll_back(paths, paths.checkpoints_dir, 0, 1, weights=True, rollouts=True)
        await is_seen.wait()
        await asyncio.sleep(0.05)  # for a start that should not be
        assert not paths.ledger(1).exists(), "it does not begin before the batch is written"
        rewound.set()
        for step in range(STEPS):
            await until(lambda step=step: branch_of_batch(paths.rollouts(step)) == 1)
            publish_version(paths, step + 1, 1)
        stop.set()

    started = await run_on(config, engine, back_to_the_start)
    assert [one.branch for one in started] == [0, 1]
    assert branch_of_batch(paths.abandoned(0) / "rollouts/step_1") == 0
    assert [manifest["branch"] for _, manifest in batches(paths)] == [1] * STEPS


# --- the start -------------------------------------------------------------------------------------------------


def make_batch(paths, step, branch):
    paths.rollouts(step).mkdir(parents=True)
    (paths.rollouts(step) / "manifest.json").write_text(json.dumps({"branch": branch}))


def make_ledger(paths, branch):
    paths.ledger_dir.mkdir(exist_ok=True)
    paths.ledger(branch).write_text("{}\n")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv(START_VARIABLE, raising=False)
    return make_config(tmp_path, restart=True, wait_timeout_seconds=0.05)


@pytest.fixture
def paths(config):
    paths = RunPaths(config.output_dir)
    paths.checkpoints_dir.mkdir(parents=True)
    return paths


def test_restart_continues_the_newest_ledger(config, paths, monkeypatch):
    """Of the manifests, it reads only the newest that can be read: a long run has 100,000."""
    assert find_start_point(config) == StartPoint(0), "nothing is there yet"
    make_ledger(paths, 0)
    make_ledger(paths, 2)
    for step in range(4):
        make_batch(paths, step, 2)
    (paths.rollouts(3) / "manifest.json").write_text("{")
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 2))
    read = []
    monkeypatch.setattr(resume, "branch_of_batch", lambda batch: (read.append(batch), branch_of_batch(batch))[1])
    assert find_start_point(config) == StartPoint(2)
    assert read == [paths.rollouts(3), paths.rollouts(2)]
    assert steps_in(paths.rollouts_dir) == [0, 1, 2, 3]


def test_restart_finds_a_rollback(config, paths):
    """The trainer rolled back while no orchestrator ran, or before this one started the branch."""
    make_ledger(paths, 0)
    make_batch(paths, 0, 0)
    make_batch(paths, 1, 0)
    paths.checkpoint(4).mkdir()
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 1))
    assert find_start_point(config) == StartPoint(1)
    assert steps_in(paths.rollouts_dir) == steps_in(paths.checkpoints_dir) == []
    assert steps_in(paths.abandoned(0) / "rollouts") == [0, 1] and not paths.ledger(0).exists()


@pytest.mark.parametrize("torn", ["", '{"record":"started"'])
def test_restart_ledger_without_complete_line_is_not_started(config, paths, torn):
    """The orchestrator was killed before its first record was on disk: it starts at the checkpoint again."""
    make_ledger(paths, 1)
    paths.ledger(2).write_text(torn)
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 2))
    make_batch(paths, 0, 1)
    assert find_start_point(config) == StartPoint(2)
    assert steps_in(paths.rollouts_dir) == [], "as the branch of its own would be in the way"


def test_restart_archived_ledger_waits_for_the_next_branch(config, paths):
    """The trainer was killed during a rollback; its next attempt writes the step."""
    make_batch(paths, 0, 1)
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 1))
    with pytest.raises(RunError, match="start branch 2: the ledger of the branch before was archived"):
        find_start_point(config)
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 2))
    assert find_start_point(config) == StartPoint(2)


def test_restart_supervised_waits_for_the_resume_of_this_start(config, paths, monkeypatch):
    """Files that exist before the rollback belong to the resumed run."""
    monkeypatch.setenv(START_VARIABLE, "ours")
    config = with_ckpt(config, resume_step=-1)
    make_ledger(paths, 1)
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 1, "theirs"))
    with pytest.raises(RunError, match="waited 0 s for the trainer"):
        find_start_point(config)
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 2, "ours"))
    assert find_start_point(config) == StartPoint(2)


def test_recorded_batches_are_not_archived_nor_sampled_again(config, paths):
    """If the checkpoint has no orchestrator's part, the trainer replays the recorded batches."""
    commit(paths, 1, others=())
    make_ledger(paths, 0)
    make_batch(paths, 1, 0)
    write_resume(paths.checkpoints_dir, ResumeRecord(1, 1))
    assert find_rollback(config, 0) is None
    assert find_start_point(config) == StartPoint(0) and steps_in(paths.rollouts_dir) == [1]
    resuming = with_ckpt(config.model_copy(update={"restart": False}), resume_step=1)
    with pytest.raises(RunError, match=r"rollouts/step_1 already exists, so branch 1 cannot start"):
        find_start_point(resuming)


def test_new_run_uses_the_trainers_branch(config, paths):
    write_resume(paths.checkpoints_dir, ResumeRecord(0, 3))
    assert find_start_point(config.model_copy(update={"restart": False})) == StartPoint(3)


def test_standalone_stale_resume_record_is_ignored(config, paths):
    """The record has another step, or its branch has batches already."""
    config = config.model_copy(update={"restart": False})
    write_resume(paths.checkpoints_dir, ResumeRecord(2, 1))
    with pytest.raises(RunError, match=r"waited 0 s for the trainer .* that it resumes from 4"):
        find_start_point(with_ckpt(config, resume_step=4))
    make_batch(paths, 3, 1)
    with pytest.raises(RunError, match=r"waited 0 s for the trainer"):
        find_start_point(with_ckpt(config, resume_step=-1))


def test_only_late_artifacts_are_archived(paths):
    for step, branch in ((1, 0), (2, 0), (3, 1)):
        make_batch(paths, step, branch)
    make_ledger(paths, 0)
    make_ledger(paths, 1)
    for step in (0, 1, 2, 4, 6):
        paths.checkpoint(step).mkdir()
    for step in (0, 6):
        (paths.checkpoint(step) / "COMMITTED").touch()
    (paths.abandoned(0) / "rollouts/step_2").mkdir(parents=True)  # of an earlier rewind
    archive_late_artifacts(paths, paths.checkpoints_dir, 2, 1)
    assert steps_in(paths.rollouts_dir) == [1, 3], "those before the rewind, and the branch's own"
    assert sorted(p.name for p in (paths.abandoned(0) / "rollouts").iterdir()) == ["step_2", "step_2.1"]
    assert steps_in(paths.checkpoints_dir) == [0, 2, 6], "nothing that is complete is touched"
    assert not paths.ledger(0).exists() and paths.ledger(1).exists()
