"""Where a trainer begins, also when it has died and is started again: without torch's processes, by files alone."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from prime_rl.configs.shared import CkptConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run import checkpoints as files
from prime_rl.run.checkpoints import ORCHESTRATOR, TRAINER, Resume, read_resume
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.rewind import RESTART_VARIABLE, START_VARIABLE
from prime_rl.run.wait import DeadlineError
from prime_rl.trainer.checkpoints.start import Chooser, Start
from prime_rl.trainer.rl.train import batch_source

VARIABLES = (RESTART_VARIABLE, START_VARIABLE, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")


class OneRank:
    """An `Agreement` of a world of one."""

    def on_lead(self, work):
        return work()

    def gather(self, work):
        return [work()]

    def failure(self, work):
        try:
            work()
        except RunError as error:
            return error
        return None


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
        monkeypatch.setenv(RESTART_VARIABLE, "1" if again else "0")

    return set_variables


def choose(paths, ckpt=None, serves=True, max_steps=20):
    config = TrainerConfig(ckpt=ckpt, output_dir=paths.root, max_steps=max_steps)
    world = SimpleNamespace(leads=True, rank=0, size=1)
    directory = paths.root / (ckpt or CkptConfig()).path
    return Chooser(config, paths, directory, world, OneRank(), serves).choose()


def write_checkpoint(paths, step, branch=0, parts=(TRAINER, ORCHESTRATOR)):
    for part in parts:
        temporary = files.clear_unfinished(paths.checkpoint(step), part)
        (temporary / "shard").write_bytes(b"weights")
        hashes = {"shard": files.hash_file(temporary / "shard")}
        files.seal_part(temporary, paths.checkpoint(step) / part, {}, hashes)
    return files.commit_checkpoint(paths.checkpoint(step), branch, parts, "")


def ship(paths, steps, branch=0):
    for step in steps:
        paths.rollouts(step).mkdir(parents=True)
        (paths.rollouts(step) / "manifest.json").write_text(json.dumps({"branch": branch, "step": step}))


def test_an_unattended_start_leaves_no_record(paths):
    assert choose(paths) == Start()
    assert choose(paths, CkptConfig()) == Start()
    assert read_resume(paths.checkpoints_dir) is None


@pytest.mark.parametrize("ckpt", [None, CkptConfig()])
def test_a_start_is_put_on_record_and_started_again_it_goes_back(paths, start_again, ckpt):
    start_again(again=False)
    assert choose(paths, ckpt) == Start()
    assert read_resume(paths.checkpoints_dir) == Resume(0, 0, "ours")
    ship(paths, range(3))
    paths.weights(2).mkdir(parents=True)
    start_again()
    for branch in (1, 2):  # again before there is any checkpoint
        assert choose(paths, ckpt) == Start(0, branch, None, branch)
        assert read_resume(paths.checkpoints_dir) == Resume(0, branch, "ours")
        assert steps_in(paths.rollouts_dir) == steps_in(paths.weights_dir) == []
    if ckpt is None:
        return
    commit = write_checkpoint(paths, 5, branch=2)
    ship(paths, range(8), branch=2)
    assert choose(paths, ckpt) == Start(5, 3, commit, 3)
    assert steps_in(paths.rollouts_dir) == [0, 1, 2, 3, 4]


def test_what_the_first_attempt_refused_the_second_does_not_take_for_its_own(paths, start_again):
    """torchrun starts again whatever ended its ranks, bad input too."""
    write_checkpoint(paths, 5)
    files.write_resume(paths.checkpoints_dir, Resume(0, 1, "theirs"))
    start_again()
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
            choose(paths, CkptConfig())
    assert files.find_checkpoints(paths.checkpoints_dir).steps == [5]


def test_a_resume_that_is_started_again_goes_on_from_its_own_newest(paths, start_again):
    for step in (5, 10):
        write_checkpoint(paths, step)
    start_again()  # the first attempt died before it had chosen
    assert choose(paths, CkptConfig(resume_step=5)).step == 5
    assert files.find_checkpoints(paths.checkpoints_dir).steps == [5], "10 is of the line that ended"
    commit = write_checkpoint(paths, 8, branch=1)
    assert choose(paths, CkptConfig(resume_step=5)) == Start(8, 2, commit, 2)


def test_torchruns_own_restarts_need_no_rl(paths, monkeypatch):
    """A trainer with an orchestrator, by hand: a ledger tells that there is one."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert choose(paths).step == 0
    record = read_resume(paths.checkpoints_dir)
    assert record.start and str(os.getppid()) in record.start
    paths.ledger_dir.mkdir()
    paths.ledger(0).touch()
    ship(paths, range(2))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose(paths) == Start(0, 1, None, 1)
    assert steps_in(paths.rollouts_dir) == [] and not paths.ledger(0).exists()


def test_a_trainer_alone_keeps_its_recorded_batches(paths, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    ship(paths, range(9))
    choose(paths, CkptConfig())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose(paths, CkptConfig()) == Start(0, 1, None, None)
    commit = write_checkpoint(paths, 5, branch=1, parts=(TRAINER,))
    assert choose(paths, CkptConfig()) == Start(5, 2, commit, None)
    assert steps_in(paths.rollouts_dir) == list(range(9))


def test_supervised_fine_tuning_has_no_batches_to_wait_for(paths, start_again):
    start_again(again=False)
    choose(paths, CkptConfig(), serves=False)
    commit = write_checkpoint(paths, 5, parts=(TRAINER,))
    paths.weights(5).mkdir(parents=True)
    paths.weights(7).mkdir()
    start_again()
    assert choose(paths, CkptConfig(), serves=False) == Start(5, 1, commit, None)
    assert steps_in(paths.weights_dir) == [5]


def test_with_all_steps_published_and_no_checkpoint_there_is_nothing_to_do_again(paths, start_again):
    start_again(again=False)
    choose(paths, max_steps=3)
    paths.weights(3).mkdir(parents=True)
    start_again()
    assert choose(paths, max_steps=3) == Start(step=3)
    assert steps_in(paths.weights_dir) == [3]


def damage_shard(part):
    (part / "shard").write_bytes(b"wEights")


def empty_shard(part):
    (part / "shard").write_bytes(b"")


def empty_part(part):
    shutil.rmtree(part)
    part.mkdir()


def empty_commit(part):
    (part.parent / "COMMITTED").write_bytes(b"")


@pytest.mark.parametrize("part", [TRAINER, ORCHESTRATOR])
@pytest.mark.parametrize("damage", [damage_shard, empty_shard, empty_part, empty_commit])
def test_the_newest_whose_parts_are_all_whole_is_chosen_and_the_others_are_named(paths, damage, part):
    for step in (5, 10):
        write_checkpoint(paths, step)
    damage(paths.checkpoint(10) / part)
    (paths.checkpoints_dir / "step_30.tmp").mkdir()
    warnings = []
    handler = files_warnings(warnings)
    try:
        assert choose(paths, CkptConfig(resume_step=-1)).step == 5
    finally:
        handler()
    assert any(f"{paths.checkpoint(10)} is not used" in line for line in warnings), warnings
    assert any("step_30.tmp is not used" in line for line in warnings), warnings


def files_warnings(lines):
    """Collect what is logged, until the returned function is called."""
    from loguru import logger

    number = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    return lambda: logger.remove(number)


def test_a_batch_of_another_branch_is_not_taken_for_the_one_that_is_waited_for(paths, monkeypatch):
    """An orchestrator that has not seen the rewind yet wrote it; its own takes its place later."""
    config = TrainerConfig(output_dir=paths.root, wait_timeout_seconds=0.1)
    publisher = SimpleNamespace(check=lambda: None)
    heart = SimpleNamespace(enter=lambda *_: None)
    read = []

    def read_batch(path, step):
        read.append(json.loads((path / "manifest.json").read_text())["branch"])
        return "batch", {"async_level": config.async_level}

    monkeypatch.setattr("prime_rl.trainer.rl.train.read_batch", read_batch)
    ship(paths, [4], branch=1)
    with pytest.raises(DeadlineError, match="step_4"):
        batch_source(config, paths, None, publisher, heart, branch=2)(4)
    assert batch_source(config, paths, None, publisher, heart)(4) == "batch", "a trainer alone takes any"
    shutil.rmtree(paths.rollouts(4))
    ship(paths, [4], branch=2)
    assert batch_source(config, paths, None, publisher, heart, branch=2)(4) == "batch"
    assert read == [1, 2]
