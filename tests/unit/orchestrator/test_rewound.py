"""I3 while the trainer dies, is started again and goes back: the orchestrator that lives on follows, to the letter."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from prime_rl.configs.shared import CkptConfig, ClientConfig
from prime_rl.errors import RunError
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.beginning import Beginning, Rewound, find_beginning, find_rewind
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.orchestrator.setup import connect, model_access, start_environments
from prime_rl.run import checkpoints
from prime_rl.run.checkpoints import Resume, find_checkpoints, read_resume, write_resume
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.rewind import START_VARIABLE, branch_of_batch, next_branch, put_aside_late, rewind
from prime_rl.run.wait import changes
from tests.support.fake_engine import fake_engine, publish_version
from tests.unit.orchestrator.test_checkpoint import commit, told, with_ckpt
from tests.unit.orchestrator.test_orchestrator import STEPS, batches, make_config, metrics

in_loop = pytest.mark.asyncio(loop_scope="session")
EVERY = 2
"""Steps between two checkpoints."""


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


class MortalTrainer:
    """A trainer without a model, which dies where it is told to, and goes back as a restarted one does.

    Attributes:
        trained: (branch, step, group_ids) of every batch that was trained on, in order.
    """

    def __init__(self, paths, deaths, ckpt):
        """Die before the steps of `deaths`, one after the other."""
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
        async for _ in changes(self._paths.rollouts_dir, stop):
            if branch_of_batch(self._paths.rollouts(step)) == branch:
                return False
        return True

    async def _go_back(self):
        """Some time after its death: the orchestrator gets as far as the bound lets it, and a last batch comes late."""
        paths = self._paths
        await asyncio.sleep(0.1)
        found = find_checkpoints(paths.checkpoints_dir).complete
        last = found[-1] if found else None
        branch = next_branch(paths.checkpoints_dir, last)
        step = last.step if last else 0
        rewind(paths, paths.checkpoints_dir, step, branch, weights=True, rollouts=True)
        if step:
            publish_version(paths, step, branch)
        return step, branch


@pytest.fixture
def run_on(host):
    """Run an orchestrator as `orchestrate` does: begin again whenever the trainer has gone back."""

    async def run(config, engine, trainer):
        config = config.model_copy(update={"client": ClientConfig(base_url=[engine.url])})
        paths, stop, begun = RunPaths(config.output_dir), asyncio.Event(), []
        training = asyncio.create_task(trainer(stop))
        try:
            while True:
                begun.append(await asyncio.to_thread(find_beginning, config))
                async with AsyncExitStack() as stack:
                    environments = await start_environments(config, host, model_access(config), paths, stack)
                    servers = [await connect(config, engine.url, stack)]
                    monitor = Monitor(paths, "orchestrator", None)
                    stack.callback(monitor.close)
                    try:
                        await Orchestrator(config, environments, servers, monitor, beginning=begun[-1]).run()
                        break
                    except Rewound:
                        assert engine.holder is not None, "nobody else gets the server meanwhile"
                config = config.model_copy(update={"restart": True})
            await training
        finally:
            stop.set()
            training.cancel()
        return begun

    return run


@in_loop
@pytest.mark.parametrize(("ckpt", "deaths", "begins"), [(True, [3, 5, 5], [0, 2, 4, 4]), (False, [2, 1], [0, 0, 0])])
async def test_a_living_orchestrator_follows(tmp_path, tokenizer_dir, run_on, ckpt, deaths, begins):
    """Also when the trainer dies again before it has come any further, and when there are no checkpoints."""
    config = make_config(tmp_path, tokenizer_dir, async_level=2)
    config = config.model_copy(update={"ckpt": CkptConfig(interval=EVERY) if ckpt else None})
    paths = RunPaths(config.output_dir)
    trainer = MortalTrainer(paths, deaths, ckpt)
    async with fake_engine() as engine:
        begun = await run_on(config, engine, trainer)
        assert (engine.branch, engine.step) == (len(deaths), STEPS)
    assert [one.cut.step if one.cut else 0 for one in begun] == begins
    assert [one.branch for one in begun] == list(range(len(deaths) + 1))
    surviving = {step: (branch, groups) for branch, step, groups in trainer.trained}
    assert [surviving[step] for step in range(STEPS)] == [
        (manifest["branch"], manifest["group_ids"]) for _, manifest in batches(paths)
    ], "what was trained on last is what stays"
    assert sorted(told(paths)) == list(range(STEPS * 3)), "every position of the stream once"
    for step, (batch, _) in enumerate(batches(paths)):
        assert step - batch.versions[batch.loss_mask == 1].min() <= 2
    assert [line["step"] for line in metrics(paths)] == list(range(STEPS))
    assert [ledger.name for ledger in paths.ledger_dir.iterdir()] == [f"branch_{len(deaths)}.jsonl"]
    assert read_resume(paths.checkpoints_dir).branch == len(deaths)


@in_loop
async def test_a_batch_that_is_being_written_is_waited_for(tmp_path, tokenizer_dir, run_on, monkeypatch):
    """Its thread knows nothing of a rewind: the batch would appear in the middle of the new branch."""
    config = with_ckpt(make_config(tmp_path, tokenizer_dir, async_level=0))
    paths = RunPaths(config.output_dir)
    whole, loop = Orchestrator._write, asyncio.get_running_loop()
    written, rewound = asyncio.Event(), asyncio.Event()

    def slow(self, step, *rest):
        if step == 1 and self._beginning.branch == 0:
            loop.call_soon_threadsafe(written.set)
            asyncio.run_coroutine_threadsafe(rewound.wait(), loop).result()
        return whole(self, step, *rest)

    monkeypatch.setattr(Orchestrator, "_write", slow)

    async def back_to_the_start(stop):
        await until(lambda: paths.rollouts(0).exists())
        publish_version(paths, 1)
        await written.wait()
        rewind(paths, paths.checkpoints_dir, 0, 1, weights=True, rollouts=True)
        await asyncio.sleep(0.4)  # long enough to be seen
        assert not paths.ledger(1).exists(), "it does not begin before the batch is written"
        rewound.set()
        await train_on_branch(paths, stop)

    async with fake_engine() as engine:
        begun = await run_on(config, engine, back_to_the_start)
    assert [one.branch for one in begun] == [0, 1]
    assert branch_of_batch(paths.abandoned(0) / "rollouts/step_1") == 0
    assert [manifest["branch"] for _, manifest in batches(paths)] == [1] * STEPS


async def train_on_branch(paths, stop, branch=1):
    for step in range(STEPS):
        await until(lambda step=step: branch_of_batch(paths.rollouts(step)) == branch)
        publish_version(paths, step + 1, branch)
    stop.set()


def make_batch(paths, step, branch):
    paths.rollouts(step).mkdir(parents=True)
    (paths.rollouts(step) / "manifest.json").write_text(json.dumps({"branch": branch}))


def make_ledger(paths, branch):
    paths.ledger_dir.mkdir(exist_ok=True)
    paths.ledger(branch).write_text("{}\n")


@pytest.fixture
def config(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.delenv(START_VARIABLE, raising=False)
    return make_config(tmp_path, tokenizer_dir, restart=True, wait_timeout_seconds=0.3)


@pytest.fixture
def paths(config):
    paths = RunPaths(config.output_dir)
    paths.checkpoints_dir.mkdir(parents=True)
    return paths


def test_a_restart_with_nothing_on_the_disk_yet_begins(config, paths):
    assert find_beginning(config) == Beginning(0)


def test_a_restart_goes_on_with_the_newest_ledger(config, paths):
    make_ledger(paths, 0)
    make_ledger(paths, 2)
    make_batch(paths, 0, 2)
    write_resume(paths.checkpoints_dir, Resume(0, 2))
    assert find_beginning(config) == Beginning(2)
    assert steps_in(paths.rollouts_dir) == [0]


def test_a_restart_finds_that_the_trainer_has_gone_back_since(config, paths):
    """The trainer went back while no orchestrator lived, or before this one had begun the branch."""
    make_ledger(paths, 0)
    make_batch(paths, 0, 0)
    make_batch(paths, 1, 0)
    paths.checkpoint(4).mkdir()
    write_resume(paths.checkpoints_dir, Resume(0, 1))
    assert find_beginning(config) == Beginning(1)
    assert steps_in(paths.rollouts_dir) == steps_in(paths.checkpoints_dir) == []
    assert steps_in(paths.abandoned(0) / "rollouts") == [0, 1] and not paths.ledger(0).exists()


@pytest.mark.parametrize("torn", ["", '{"record":"started"'])
def test_a_ledger_without_a_whole_line_was_not_begun(config, paths, torn):
    """The orchestrator was killed before its first record was on the disk: it begins at the checkpoint again."""
    make_ledger(paths, 1)
    paths.ledger(2).write_text(torn)
    write_resume(paths.checkpoints_dir, Resume(0, 2))
    make_batch(paths, 0, 1)
    assert find_beginning(config) == Beginning(2)
    assert steps_in(paths.rollouts_dir) == [], "as the branch of its own would be in the way"


def test_a_ledger_that_was_put_aside_is_not_begun_anew(config, paths):
    """The trainer died in the middle of going back; its next attempt says where."""
    make_batch(paths, 0, 1)
    write_resume(paths.checkpoints_dir, Resume(0, 1))
    with pytest.raises(RunError, match="begin branch 2: the ledger of the one before is gone"):
        find_beginning(config)
    write_resume(paths.checkpoints_dir, Resume(0, 2))
    assert find_beginning(config) == Beginning(2)


def test_under_rl_a_restart_waits_for_the_resume_of_its_start(config, paths, monkeypatch):
    """What lies there before the trainer has gone back is of the run that is resumed."""
    monkeypatch.setenv(START_VARIABLE, "ours")
    config = config.model_copy(update={"ckpt": CkptConfig(resume_step=-1)})
    make_ledger(paths, 1)
    write_resume(paths.checkpoints_dir, Resume(0, 1, "theirs"))
    with pytest.raises(RunError, match="waited 0 s for the trainer"):
        find_beginning(config)
    write_resume(paths.checkpoints_dir, Resume(0, 2, "ours"))
    assert find_beginning(config) == Beginning(2)


def test_recorded_batches_are_not_put_aside(config, paths):
    """A trainer whose checkpoint has no orchestrator's part goes on with what is there; so does the orchestrator."""
    temporary = checkpoints.clear_unfinished(paths.checkpoint(1), checkpoints.TRAINER)
    checkpoints.seal_part(temporary, paths.checkpoint(1) / checkpoints.TRAINER, {}, {})
    checkpoints.commit_checkpoint(paths.checkpoint(1), 0, [checkpoints.TRAINER], "")
    make_ledger(paths, 0)
    make_batch(paths, 1, 0)
    write_resume(paths.checkpoints_dir, Resume(1, 1))
    assert find_rewind(config, 0) is None
    assert find_beginning(config) == Beginning(0) and steps_in(paths.rollouts_dir) == [1]


def test_a_new_run_takes_the_branch_that_its_trainer_takes(config, paths):
    write_resume(paths.checkpoints_dir, Resume(0, 3))
    assert find_beginning(config.model_copy(update={"restart": False})) == Beginning(3)


def test_by_hand_what_an_earlier_resume_has_left_is_not_taken_for_another(config, paths):
    """It went back to another step, or its branch has batches already."""
    config = config.model_copy(update={"restart": False, "ckpt": CkptConfig(resume_step=4)})
    write_resume(paths.checkpoints_dir, Resume(2, 1))
    with pytest.raises(RunError, match=r"waited 0 s for the trainer .* that it resumes from 4"):
        find_beginning(config)
    newest = config.model_copy(update={"ckpt": CkptConfig(resume_step=-1)})
    make_batch(paths, 3, 1)
    with pytest.raises(RunError, match=r"waited 0 s for the trainer"):
        find_beginning(newest)


def test_what_comes_late_is_put_aside_and_nothing_else(paths):
    for step, branch in ((1, 0), (2, 0), (3, 1)):
        make_batch(paths, step, branch)
    make_ledger(paths, 0)
    make_ledger(paths, 1)
    for step in (2, 4):
        paths.checkpoint(step).mkdir()
    paths.checkpoint(6).mkdir()
    (paths.checkpoint(6) / "COMMITTED").touch()
    (paths.abandoned(0) / "rollouts/step_2").mkdir(parents=True)  # of an earlier rewind
    put_aside_late(paths, paths.checkpoints_dir, 2, 1)
    assert steps_in(paths.rollouts_dir) == [1, 3], "those before the rewind, and the branch's own"
    assert sorted(p.name for p in (paths.abandoned(0) / "rollouts").iterdir()) == ["step_2", "step_2.1"]
    assert steps_in(paths.checkpoints_dir) == [2, 6], "nothing that is complete is touched"
    assert not paths.ledger(0).exists() and paths.ledger(1).exists()
