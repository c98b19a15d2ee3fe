"""Several LoRA runs in one trainer: each run gets the weights that it gets alone."""

import json
import os
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from operator import attrgetter

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.batch import write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import wait_for, wait_until
from prime_rl.trainer.adapter_engine import run_jobs
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import NodeRanks
from prime_rl.trainer.rl import trained_run
from prime_rl.trainer.rl.batch_source import fake_batch
from prime_rl.trainer.rl.multi_run import ActiveRun, take_turns
from prime_rl.trainer.rl.runs import derive_config
from prime_rl.trainer.trainer_nodes import join_nodes
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.command import PROGRESS_TIMEOUT_SECONDS
from tests.unit.trainer.world import run_command

STEPS = 3
RUNS = {
    "run_alpha": {"optim": {"lr": 1e-3}, "batch": 10},
    "run_beta": {
        "optim": {"lr": 1e-2, "max_norm": 0.01}, "lora": {"rank": 2, "alpha": 8.0}, "loss": {"type": "grpo"},
        "batch": 40, "num_minibatches": 2,
    },
    "run_gamma": {"loss": {"kl": {"coef": 0.1}}, "scheduler": {"type": "linear"}, "batch": 3, "seed": 7},
}  # fmt: skip


def ship(paths, size, seed, steps, damage=None):
    """Write the batches of a run as its orchestrator would."""
    config = FakeDataConfig(batch_size=size, seq_len=40, micro_batch_size=2, variable_length=True)
    for step in range(steps):
        batch = fake_batch(config, 103, row_length=80, seed=seed, step=step)
        if damage is not None and step == 1:
            damage(batch)
        write_batch(paths.rollouts(step), batch, {"branch": 0, "step": step, "async_level": 2})


def announce(stack, root, name, model, damage=None, **changes):
    """Write a run's batches and configuration, and keep the heartbeat of its orchestrator."""
    settings = {**RUNS.get(name, {"batch": 4}), **changes}
    paths = RunPaths(root / name)
    ship(paths, settings.pop("batch"), len(name), settings.pop("num_batches", STEPS), damage)
    lora = settings.pop("lora", {})
    config = OrchestratorConfig(
        model={"name": str(model), "lora": lora}, output_dir=paths.root, seq_len=80, **{"max_steps": STEPS, **settings}
    )
    heartbeat = HeartbeatWriter(paths, "orchestrator", "orchestrator", interval_seconds=0.2)
    stack.enter_context(heartbeat)
    write_config(config, paths.config("orchestrator"))
    return paths


def arguments(root, model, *more):
    fixed = ["--model.lora", "--model.lora.rank", "4", "--model.seq-len", "80", "--exit-when-idle-seconds", "0"]
    return ["--model.name", model, "--output-dir", root, "--device", "cpu", "--max-concurrent-runs", "2", *fixed, *more]


def train(root, model, ranks=1, *more):
    return run_command("trainer", arguments(root, model, *more), ranks=ranks)


def weights(paths, step=STEPS):
    return load_file(paths.weights(step) / "adapter_model.safetensors")


def difference(one, other):
    assert one.keys() == other.keys()
    return max(np.abs(one[name] - other[name]).max() for name in one)


def lines(paths):
    return [json.loads(line) for line in paths.metrics("trainer").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """The final weights of each run alone in its trainer."""
    finals = {}
    for name in RUNS:
        root = tmp_path_factory.mktemp("alone")
        with ExitStack() as stack:
            paths = announce(stack, root, name, tiny)
            code, error = train(root, tiny)
        assert code == 0, error
        finals[name] = weights(paths)
    return finals


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_runs_in_company_end_as_alone(alone, tiny, tmp_path, ranks):
    """Three runs on two slots: the third joins when one has finished."""
    with ExitStack() as stack:
        paths = {name: announce(stack, tmp_path, name, tiny) for name in RUNS}
        code, error = train(tmp_path, tiny, ranks)
    assert code == 0, error
    for name, run in paths.items():
        assert difference(weights(run), alone[name]) <= 1e-5, name
        assert [line["step"] for line in lines(run)] == list(range(STEPS))
        for line in lines(run):
            waits = ("wait_for_batch", "wait_for_turn", "synchronize")
            assert line["time/busy"] == pytest.approx(line["time/step"] - sum(line[f"time/{name}"] for name in waits))
    assert json.loads((paths["run_beta"].weights(1) / "adapter_config.json").read_text())["r"] == 2
    totals = lines(RunPaths(tmp_path))
    assert max(line["runs/active"] for line in totals) == 2
    assert sum(line["tokens"] for line in totals) == sum(
        line["tokens"] for run in paths.values() for line in lines(run)
    )


@contextmanager
def training(root, model, ranks=1, *more):
    """Train in the background for the length of the block; yields the future of exit code and stderr."""
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train, root, model, ranks, *more)
        try:
            yield trainer
        except BaseException:
            os.kill(trainer_of(root), signal.SIGKILL)
            raise


def trainer_of(root, rank=0):
    """Return the process id of the trainer."""
    return json.loads(RunPaths(root).heartbeat(f"trainer_{rank}").read_text())["pid"]


def phase_of(paths, name="trainer_0"):
    file = paths.heartbeat(name)
    return json.loads(file.read_text())["phase"] if file.exists() else ""


def await_phase(paths, start):
    wait_until(paths.heartbeats_dir, lambda: phase_of(paths).startswith(start), PROGRESS_TIMEOUT_SECONDS, start)


def make_advantages_infinite(batch):
    batch.advantages[np.flatnonzero(batch.loss_mask)[0]] = np.inf


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_failing_run_leaves_no_trace_in_another(alone, tiny, tmp_path, ranks):
    """A batch that is not finite, a gradient that is not, and an unknown key; the healthy run is bit-identical."""
    with ExitStack() as stack:
        healthy = announce(stack, tmp_path, "run_alpha", tiny)
        damaged = announce(stack, tmp_path, "run_gamma", tiny, make_advantages_infinite)
        sgd = {"lr": 1e30, "type": "sgd", "max_norm": None}
        wild = announce(stack, tmp_path, "run_wild", tiny, optim=sgd, max_steps=9, num_batches=4)
        typo = announce(stack, tmp_path, "run_typo", tiny, optim={"lrr": 1.0})
        full = announce(stack, tmp_path, "run_full", tiny, num_batches=1)
        full.weights_dir.touch()  # nothing can be published, and the orchestrator waits for it
        code, error = train(tmp_path, tiny, ranks)
    assert code == 0, error
    assert difference(weights(healthy), alone["run_alpha"]) <= (0 if ranks == 1 else 1e-5)
    assert "batch 1 has log-probabilities or advantages that are not finite" in damaged.evicted.read_text()
    assert weights(damaged, step=1), "the version before the bad batch stays"
    assert "gradient was not finite in 3 consecutive steps" in wild.evicted.read_text()
    assert "optim.adamw.lrr: Extra inputs are not permitted" in typo.refused.read_text()
    assert "cannot publish" in full.evicted.read_text()
    assert not healthy.evicted.exists() and not damaged.refused.exists()


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_slot_of_a_run_that_ends_goes_to_the_one_that_waits_longest(tiny, tmp_path, ranks):
    """Orchestrators that end, a folder that is removed, a run that starts again with another configuration."""
    endless = {"max_steps": 99}
    with ExitStack() as stack, training(tmp_path, tiny, ranks) as trainer:
        alpha = announce(stack, tmp_path, "run_alpha", tiny, **endless)
        beta = announce(stack, tmp_path, "run_beta", tiny, **endless)
        await_phase(alpha, f"wait for batch {STEPS}")
        await_phase(beta, f"wait for batch {STEPS}")
        gamma = announce(stack, tmp_path, "run_gamma", tiny)
        await_phase(gamma, "wait for a slot: 2 runs use this trainer, position 1")
        shutil.rmtree(alpha.root / "configs")
        shutil.rmtree(alpha.root, ignore_errors=True)  # its orchestrator still writes heartbeats
        wait_for(gamma.weights(STEPS), PROGRESS_TIMEOUT_SECONDS, "the trainer")
        await_phase(gamma, "ended")
        assert not alpha.weights_dir.exists()
        config = beta.config("orchestrator").read_text()
        beta.config("orchestrator").write_text(config.replace("max_steps = 99", "max_steps = 98"))
        wait_for(beta.refused, PROGRESS_TIMEOUT_SECONDS, "the trainer")
        assert "of an earlier run" in beta.refused.read_text(), "a start in a used folder does not resume by itself"
        stack.close()
        code, error = trainer.result()
    assert code == 0, error


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_stopped_runs_resume_as_if_not_stopped(alone, tiny, tmp_path, ranks):
    """A checkpoint of each run, then SIGTERM at one rank; a later trainer, with other ranks, resumes them."""
    names, earlier = ("run_alpha", "run_beta"), 3 - ranks
    with ExitStack() as stack, training(tmp_path, tiny, earlier) as trainer:
        paths = [announce(stack, tmp_path, name, tiny, ckpt={"interval": STEPS - 1}) for name in names]
        for run in paths:  # the last batch is not there yet
            run.rollouts(STEPS - 1).rename(run.root / "later")
        for run in paths:
            await_phase(run, f"wait for batch {STEPS - 1}")
        os.kill(trainer_of(tmp_path, earlier - 1), signal.SIGTERM)
        code, error = trainer.result()
    assert code == 128 + signal.SIGTERM, error
    with ExitStack() as stack:
        for run in paths:
            assert (run.checkpoint(STEPS - 1) / "COMMITTED").exists()
            (run.root / "later").rename(run.rollouts(STEPS - 1))
            config = OrchestratorConfig.read(run.config("orchestrator"))
            resumed = config.model_copy(update={"ckpt": config.ckpt.model_copy(update={"resume_step": -1})})
            stack.enter_context(HeartbeatWriter(run, "orchestrator", "orchestrator", interval_seconds=0.2))
            write_config(resumed, run.config("orchestrator"))
        code, error = train(tmp_path, tiny, ranks)
    assert code == 0, error
    for name, run in zip(names, paths, strict=True):
        assert difference(weights(run), alone[name]) <= 1e-5, name


_ARRIVALS = st.lists(st.dictionaries(st.integers(0, 7), st.integers(1, 30)), min_size=1, max_size=20)


@settings(max_examples=50)
@given(_ARRIVALS, st.integers(1, 8))
def test_turns_take_every_row_once_and_let_no_run_wait(arrivals, budget):
    """Rows arrive between iterations; a run gets its share of the budget in each, or a turn in the next ones."""
    left, after, waited, trained = Counter(), -1, Counter(), Counter()
    coming = list(arrivals)
    while coming or left:
        left.update(coming.pop(0) if coming else {})
        taken, after = take_turns(left, after, budget)
        assert sum(taken.values()) == min(budget, sum(left.values()))
        for idx in left:
            waited[idx] = 0 if idx in taken else waited[idx] + 1
            assert waited[idx] < -(-8 // budget)
            assert idx not in taken or taken[idx] >= min(left[idx], budget // len(left))
        trained.update(taken)
        left = +Counter({idx: count - taken.get(idx, 0) for idx, count in left.items()})
    assert trained == sum(map(Counter, arrivals), Counter())


@pytest.mark.extended
def test_run_continues_in_a_trainer_of_its_own(alone, tiny, tmp_path):
    """Counts, scale, clipping and moments are those of a trainer of one run; its initial adapter would be another."""
    with ExitStack() as stack, training(tmp_path, tiny) as trainer:
        run = announce(stack, tmp_path, "run_alpha", tiny, ckpt={"interval": 1})
        for step in range(1, STEPS):
            run.rollouts(step).rename(run.root / f"later_{step}")
        await_phase(run, "wait for batch 1")
        os.kill(trainer_of(tmp_path), signal.SIGTERM)
        trainer.result()
    for step in range(1, STEPS):
        (run.root / f"later_{step}").rename(run.rollouts(step))
    lora = ["--model.lora.rank", "4", "--model.lora.publish", "adapter", "--model.seq-len", "80", "--optim.lr", "1e-3"]
    resumed = ["--ckpt.interval", "1", "--ckpt.resume-step", "1", "--max-steps", STEPS, "--device", "cpu"]
    code, error = run_command("trainer", ["--model.name", tiny, "--output-dir", run.root, *lora, *resumed], ranks=2)
    assert code == 0, error
    assert difference(weights(run), alone["run_alpha"]) <= 1e-5


SHARED = {
    "optim": {"type": "adamw", "lr": 1e-3, "max_norm": 0.5, "eps": 1e-5},
    "loss": {"type": "cispo", "eps_high": 5.0, "kl": {"coef": 0.1}},
    "scheduler": {"type": "constant", "warmup_steps": 7},
}


@pytest.mark.parametrize(
    ("block", "changes", "expected"),
    [
        ("optim", {"type": "sgd"}, {"lr": 1e-3, "max_norm": 0.5, "momentum": 0.9}),
        ("optim", {"lr": 1e-2}, {"lr": 1e-2, "max_norm": 0.5, "eps": 1e-5}),
        ("loss", {"type": "gspo"}, {"eps_high": 4e-4, "kl.coef": 0.1, "normalization": "sequence"}),
        ("loss", {"type": "dr_grpo"}, {"fixed_length": 40, "kl.coef": 0.1}),
        ("loss", {"type": "dr_grpo", "fixed_length": 7}, {"fixed_length": 7}),
        ("scheduler", {"type": "cosine", "min_lr": 1e-4}, {"warmup_steps": 7, "min_lr": 1e-4}),
    ],
)
def test_keys_that_a_run_does_not_change_are_those_of_the_trainer(tmp_path, block, changes, expected):
    model = {"name": "model", "seq_len": 80, "lora": {"rank": 4, "publish": "adapter"}}
    trainer = TrainerConfig(model=model, max_concurrent_runs=2, **SHARED)
    run = OrchestratorConfig(model={"name": "model"}, seq_len=40, max_steps=9, **{block: changes})
    derived = getattr(derive_config(trainer, run, tmp_path), block)
    assert {key: attrgetter(key)(derived) for key in expected} == expected
    run = OrchestratorConfig(model={"name": "model"}, seq_len=40, loss={"type": "gspo", "top_entropy_quantile": 0.2})
    with pytest.raises(ConfigError, match=r"top_entropy_quantile = 0.2 is not supported in a trainer of several runs"):
        derive_config(trainer, run, tmp_path)


@pytest.fixture
def open_run(tiny, tmp_path, world):
    """Open a run of the shared policy, whose batches have `size` samples."""
    model = {"name": str(tiny), "lora": {"rank": 2}, "seq_len": 80}
    config = TrainerConfig(model=model, output_dir=tmp_path / "run_a", device="cpu", max_steps=1, num_minibatches=2)
    ship(config.run_paths, 12, 0, 1)
    policy = make_policy(config.model, 0, world, shared=True)
    heartbeat = HeartbeatWriter(config.run_paths, "trainer_0", "trainer")
    with join_nodes(config.run_paths, world, heartbeat) as directory:
        shared = trained_run.PolicyOfRuns(policy, load_tokenizer(config.tokenizer, config.model), world, directory)
        yield lambda: ActiveRun(0, config, shared, heartbeat)


@pytest.mark.parametrize("fails", ["used folder", "optimizer", "restore"])
def test_run_that_cannot_join_leaves_no_process_group(open_run, tmp_path, monkeypatch, fails):
    def refuse(*args):
        raise ConfigError("no")

    if fails == "used folder":
        RunPaths(tmp_path / "run_a").weights(1).mkdir(parents=True)
    elif fails == "optimizer":
        monkeypatch.setattr(trained_run, "build_objective", refuse)
    else:
        monkeypatch.setattr(trained_run.TrainedRun, "restore", refuse)
    before = set(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ConfigError):
        open_run()
    assert set(dist.distributed_c10d._world.pg_map) == before


def test_each_row_of_all_minibatches_is_trained_once(open_run, world):
    run = open_run()
    run.read(NodeRanks(world))
    with run.active():
        run.begin()
    left, num_jobs = [len(rows) for rows, _ in run._minibatches], 0
    assert len(left) == 2 and min(left) > 1
    while run.batch is not None:
        run_jobs(run._policy, world, [run.job(1)])
        run.update()
        run.finish()
        num_jobs += 1
        assert num_jobs <= sum(left)
    assert num_jobs == sum(left) and run.is_finished
    run.close()
