"""The start point of a new, resumed or restarted trainer, tested with files only."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness import heartbeat_writer
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage import checkpoint_artifacts as files
from prime_rl.storage.batch import Progress
from prime_rl.storage.checkpoint_artifacts import ORCHESTRATOR, TRAINER, ResumeRecord, read_resume
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.rollback import RESTART_VARIABLE, START_VARIABLE
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.checkpoints.resume_point import ResumeDecision, ResumePoint
from prime_rl.trainer.rl.batch_source import BatchSource, fake_batch
from prime_rl.trainer.rl.trained_run import TrainedRun

VARIABLES = (RESTART_VARIABLE, START_VARIABLE, SUPERVISED, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")


ONE_RANK = SimpleNamespace(on_main=lambda work: work(), gather=lambda work: [work()])


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


@pytest.fixture
def start_again(monkeypatch):
    """As `rl` starts the trainer under the name "ours", first or again."""

    def set_variables(again=True):
        monkeypatch.setenv(START_VARIABLE, "ours")
        monkeypatch.setenv(SUPERVISED, "1")
        monkeypatch.setenv(RESTART_VARIABLE, "1" if again else "0")

    return set_variables


def choose(paths, ckpt=None, publishes_versions=True, max_steps=20, check=lambda manifest: None):
    config = TrainerConfig(ckpt=ckpt, output_dir=paths.root, max_steps=max_steps)
    world = SimpleNamespace(is_main=True, rank=0, size=1)
    directory = paths.root / (ckpt or CkptConfig()).path
    return ResumeDecision(config, paths, directory, world, ONE_RANK, publishes_versions, check).choose()


def write_checkpoint(paths, step, branch=0, parts=(TRAINER, ORCHESTRATOR)):
    for part in parts:
        temporary = files.prepare_part(paths.checkpoint(step), part)
        (temporary / "shard").write_bytes(b"weights")
        hashes = {"shard": files.hash_file(temporary / "shard")}
        files.seal_part(temporary, paths.checkpoint(step) / part, {}, hashes)
    return files.commit_checkpoint(paths.checkpoint(step), branch, parts, "")


def ship(paths, steps, branch=0):
    for step in steps:
        paths.rollouts(step).mkdir(parents=True)
        (paths.rollouts(step) / "manifest.json").write_text(json.dumps({"branch": branch, "step": step}))


def test_start_without_supervisor_is_not_recorded(paths):
    assert choose(paths) == ResumePoint()
    assert choose(paths, CkptConfig()) == ResumePoint()
    assert read_resume(paths.checkpoints_dir) is None


@pytest.mark.parametrize("ckpt", [None, CkptConfig()])
def test_restart_of_recorded_start_rolls_back(paths, start_again, ckpt):
    start_again(again=False)
    assert choose(paths, ckpt) == ResumePoint()
    assert read_resume(paths.checkpoints_dir) == ResumeRecord(0, 0, "ours")
    ship(paths, range(3))
    paths.weights(2).mkdir(parents=True)
    start_again()
    for branch in (1, 2):  # again before there is any checkpoint
        assert choose(paths, ckpt) == ResumePoint(0, branch, None, branch)
        assert read_resume(paths.checkpoints_dir) == ResumeRecord(0, branch, "ours")
        assert steps_in(paths.rollouts_dir) == steps_in(paths.weights_dir) == []
    if ckpt is None:
        return
    commit = write_checkpoint(paths, 5, branch=2)
    ship(paths, range(8), branch=2)
    assert choose(paths, ckpt) == ResumePoint(5, 3, commit, 3)
    assert steps_in(paths.rollouts_dir) == [0, 1, 2, 3, 4]


def test_restart_after_refused_start_is_refused_too(paths, start_again):
    """torchrun starts again whatever ended its ranks, bad input too."""
    write_checkpoint(paths, 5)
    files.write_resume(paths.checkpoints_dir, ResumeRecord(0, 1, "theirs"))
    start_again()
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        choose(paths, CkptConfig())


def test_restart_of_resume_continues_from_newest_checkpoint(paths, start_again):
    for step in (5, 10):
        write_checkpoint(paths, step)
    start_again()  # the first attempt died before it had chosen
    assert choose(paths, CkptConfig(resume_step=5)).step == 5
    assert files.find_checkpoints(paths.checkpoints_dir).steps == [5], "10 is of the line that ended"
    commit = write_checkpoint(paths, 8, branch=1)
    assert choose(paths, CkptConfig(resume_step=5)) == ResumePoint(8, 2, commit, 2)


def test_resume_by_a_scheduler_takes_the_run_over(paths, monkeypatch):
    """Under `rl`, which holds the lock of the run, there is nothing to take over."""
    monkeypatch.setattr(heartbeat_writer, "TAKEOVER_SECONDS", 0)
    monkeypatch.setenv(START_VARIABLE, "7.1")
    write_checkpoint(paths, 5)
    monkeypatch.setenv(SUPERVISED, "1")
    assert choose(paths, CkptConfig(resume_step=-1)).branch == 1
    assert not paths.owner.exists()
    monkeypatch.delenv(SUPERVISED)
    assert choose(paths, CkptConfig(resume_step=-1)).branch == 2
    assert paths.owner.read_text() == "7.1"


def test_restart_by_torchrun_resumes_without_rl(paths, monkeypatch):
    """A trainer with an orchestrator, by hand: a ledger tells that there is one."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert choose(paths).step == 0
    record = read_resume(paths.checkpoints_dir)
    assert record.start and str(os.getppid()) in record.start
    paths.ledger_dir.mkdir()
    paths.ledger(0).touch()
    ship(paths, range(2))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose(paths) == ResumePoint(0, 1, None, 1)
    assert steps_in(paths.rollouts_dir) == [] and not paths.ledger(0).exists()


def test_resume_without_orchestrator_keeps_batches(paths, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    ship(paths, range(9))
    choose(paths, CkptConfig())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose(paths, CkptConfig()) == ResumePoint(0, 1, None, None)
    commit = write_checkpoint(paths, 5, branch=1, parts=(TRAINER,))
    assert choose(paths, CkptConfig()) == ResumePoint(5, 2, commit, None)
    assert steps_in(paths.rollouts_dir) == list(range(9))


@pytest.mark.parametrize(
    ("max_steps", "skip", "kept"), [(4, False, ""), (5, True, ", which ckpt.skip_progress does not reset")]
)
def test_resume_beyond_max_steps_is_refused(paths, start_again, max_steps, skip, kept):
    write_checkpoint(paths, 5)
    ckpt = CkptConfig(resume_step=-1, skip_progress=skip)
    with pytest.raises(ConfigError, match=f"max_steps = {max_steps}, .* has completed 5 steps{kept}; increase"):
        choose(paths, ckpt, max_steps=max_steps)
    assert not paths.abandoned(0).exists()
    if skip:
        start_again()
        assert choose(paths, ckpt, max_steps=max_steps).step == 5, "a restart after the last step"


@pytest.mark.parametrize(("max_steps", "last"), [(5, True), (6, False), (None, False)])
def test_restored_version_is_the_last_if_no_step_follows(paths, max_steps, last):
    """The last version is always written to files, not to memory."""
    run, published = TrainedRun.__new__(TrainedRun), []
    run._config = TrainerConfig(output_dir=paths.root, max_steps=max_steps)
    run.progress, run._paths = Progress(5), paths
    run._checkpoints = SimpleNamespace(resumes=True, branch=1)
    run.publisher = SimpleNamespace(start=lambda *arguments: published.append(arguments))
    run.publish_restored()
    assert published == [(paths.weights(5), PolicyVersion(1, 5), last)]


def test_schedule_that_starts_over_ends_with_the_run(paths):
    """With ckpt.skip_scheduler, at step 4 of 8."""
    run, factors = TrainedRun.__new__(TrainedRun), []
    run._config = TrainerConfig(
        output_dir=paths.root,
        max_steps=8,
        scheduler={"type": "linear", "warmup_steps": 1},
        optim={"type": "sgd", "lr": 1.0},
    )
    run._exporter = SimpleNamespace(start_step=lambda step: None)
    run._distributions = SimpleNamespace(record=lambda *arguments: None)
    batch, run._objective, run._checkpoints = SimpleNamespace(sources={}), None, SimpleNamespace(schedule_start=4)
    for step in range(4, 8):
        run.progress = Progress(step)
        factors.append(run.begin_step(batch, 1)[1])
    assert factors == pytest.approx([0.5, 1, 2 / 3, 1 / 3])


def test_restart_of_sft_requires_no_branch(paths, start_again):
    commit = write_checkpoint(paths, 5, parts=(TRAINER,))
    files.write_resume(paths.checkpoints_dir, ResumeRecord(0, 0, "ours"))
    for step in (5, 7):
        paths.weights(step).mkdir(parents=True)
    start_again()
    assert choose(paths, CkptConfig(), publishes_versions=False) == ResumePoint(5, 1, commit, None)
    assert steps_in(paths.weights_dir) == [5]


def test_restart_of_completed_run_without_checkpoints_does_nothing(paths, start_again):
    start_again(again=False)
    choose(paths, max_steps=3)
    paths.weights(3).mkdir(parents=True)
    start_again()
    assert choose(paths, max_steps=3) == ResumePoint(step=3)
    assert steps_in(paths.weights_dir) == [3]


def damage_shard(part):
    (part / "shard").write_bytes(b"wEights")


def empty_commit(part):
    (part.parent / "COMMITTED").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "part"), [(damage_shard, TRAINER), (damage_shard, ORCHESTRATOR), (empty_commit, TRAINER)]
)
def test_newest_complete_checkpoint_is_chosen_and_others_are_logged(paths, damage, part, said):
    for step in (5, 10):
        write_checkpoint(paths, step)
    damage(paths.checkpoint(10) / part)
    (paths.checkpoints_dir / "step_30.tmp").mkdir()
    assert choose(paths, CkptConfig(resume_step=-1)).step == 5
    for path in (paths.checkpoint(10), "step_30.tmp"):
        assert any(f"{path} is not used" in line for line in said()), said()


def test_start_that_is_not_possible_is_refused_and_moves_nothing(paths):
    def refuse(manifest):
        assert manifest["files"] == {"shard": 7}
        raise ConfigError("other data")

    for step in (3, 6):
        write_checkpoint(paths, step)
    damage_shard(paths.checkpoint(6) / TRAINER)
    (paths.root / "file").touch()
    before = sorted(paths.root.rglob("*"))
    for ckpt, error, message in (
        (CkptConfig(), ConfigError, r"^output_dir: .*holds checkpoints of an earlier run \(steps 3 to 6\)"),
        (CkptConfig(resume_step=5), ConfigError, "ckpt.resume_step = 5: .* complete checkpoints: 3, 6$"),
        (CkptConfig(resume_step=6), RunError, f"{paths.checkpoint(6) / TRAINER / 'shard'} is damaged"),
        (CkptConfig(path=paths.root / "file"), ConfigError, f"^ckpt.path: cannot create {paths.root / 'file'}"),
    ):
        with pytest.raises(error, match=message):
            choose(paths, ckpt)
    with pytest.raises(ConfigError, match="other data"):
        choose(paths, CkptConfig(resume_step=3), check=refuse)
    assert sorted(paths.root.rglob("*")) == before


def test_read_ignores_batches_of_other_branches(paths, monkeypatch):
    """An orchestrator that has not seen the rewind yet wrote it; its own takes its place later."""
    config = TrainerConfig(output_dir=paths.root, wait_timeout_seconds=0.1)
    heartbeat = SimpleNamespace(enter=lambda *_, **__: None)
    read, shipped = [], fake_batch(FakeDataConfig(), 9, row_length=64, seed=0, step=4)

    def read_batch(path, step):
        read.append(json.loads((path / "manifest.json").read_text())["branch"])
        return shipped, {"async_level": config.async_level}

    monkeypatch.setattr("prime_rl.trainer.rl.batch_source.read_batch", read_batch)
    ship(paths, [4], branch=1)
    with pytest.raises(DeadlineError, match="step_4"):
        BatchSource(config, paths, 0, lambda: None, heartbeat, branch=2).read(4)
    assert BatchSource(config, paths, 0, lambda: None, heartbeat).read(4).tokens is shipped.tokens, (
        "a trainer alone takes any"
    )
    shutil.rmtree(paths.rollouts(4))
    ship(paths, [4], branch=2)
    assert BatchSource(config, paths, 0, lambda: None, heartbeat, branch=2).read(4).tokens is shipped.tokens
    assert read == [1, 2]
