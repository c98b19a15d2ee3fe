"""The RL trainer as a process: alone, on two ranks under torchrun, and on bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.run.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.run.batch import ROWS_FILE, write_batch
from prime_rl.run.heart import Heartbeat
from prime_rl.run.heartbeat import read_beats
from prime_rl.run.paths import RunPaths
from prime_rl.run.peers import PeerLost
from prime_rl.run.tensors import hash_tensors
from prime_rl.run.wait import DeadlineError, wait_for
from prime_rl.supervisor.process import SUPERVISED
from prime_rl.trainer.rl.batches import fake_batch
from prime_rl.trainer.rl.train import batch_source
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_command

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "src/prime_rl/trainer/rl/train.py"
STEPS = 3
METRICS = {
    "step", "loss", "grad_norm", "entropy", "mismatch_kl", "mismatch_kl/on_policy", "importance_ratio/mean",
    "importance_ratio/clipped", "lr", "time/step", "time/wait_for_batch", "time/train", "time/publish",
    "perf/tokens_per_second", "perf/mfu", "optim/skipped", "tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def ship(root, steps=STEPS):
    """Write batches as the orchestrator would."""
    config = FakeDataConfig(batch_size=10, seq_len=40, micro_batch_size=2, generate_samples=True)
    for step in range(steps):
        batch = fake_batch(config, 103, row_length=80, seed=5, step=step)
        write_batch(RunPaths(root).rollouts(step), batch, {"branch": 0, "step": step, "async_level": 2})


def start_torchrun(ranks, arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [*launcher, "--local-ranks-filter=0", str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(arguments, ranks=1):
    if ranks == 1:
        return run_command("trainer", arguments)
    with start_torchrun(ranks, arguments) as process:
        try:
            error = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    return process.returncode, error


def base_arguments(model, root, *more):
    fixed = ["--model.name", model, "--output-dir", root, "--max-steps", STEPS, "--optim.lr", "1e-3"]
    return [*fixed, "--device", "cpu", "--seed", "0", *more]


def metrics_of(root):
    return [json.loads(line) for line in RunPaths(root).metrics("trainer").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """The same batches trained by one rank and by two under torchrun."""
    roots = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for ranks, root in roots.items():
        ship(root)
        code, error = run(base_arguments(model, root, "--minibatches", "2"), ranks)
        assert code == 0, error
    return roots


def test_every_step_is_reported_and_published(runs):
    for root in runs.values():
        lines = metrics_of(root)
        assert [line["step"] for line in lines] == list(range(STEPS))
        assert all(line.keys() >= METRICS for line in lines)
        assert all(line["mismatch_kl/on_policy"] == line["mismatch_kl"] > 0 for line in lines)
        for step in range(1, STEPS + 1):
            manifest = read_manifest(RunPaths(root).weights(step), WEIGHTS_FORMAT)
            assert (manifest["branch"], manifest["step"]) == (0, step)
        assert len({read_manifest(RunPaths(root).weights(s), WEIGHTS_FORMAT)["hash"] for s in (1, 2, 3)}) == 3


def test_every_rank_has_a_heartbeat_that_ends_in_order(runs):
    """I7"""
    for ranks, root in runs.items():
        beats = read_beats(RunPaths(root))
        assert list(beats) == [f"trainer_{rank}" for rank in range(ranks)]
        assert {(beat.role, beat.phase) for beat in beats.values()} == {("trainer", "ended")}
        assert all(beat.progress > 6 * STEPS for beat in beats.values())


def test_two_ranks_train_like_one(runs):
    """I9, through torchrun and files."""
    for one, two in zip(metrics_of(runs[1]), metrics_of(runs[2]), strict=True):
        assert two["tokens"] == one["tokens"]
        for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "importance_ratio/mean"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_rows_are_deleted_below_the_current_step_and_manifests_stay(runs):
    for root in runs.values():
        paths = RunPaths(root)
        assert [(paths.rollouts(n) / ROWS_FILE).exists() for n in range(STEPS)] == [False, False, True]
        assert all((paths.rollouts(n) / "manifest.json").exists() for n in range(STEPS))


def test_an_earlier_runs_weights_are_refused(runs, model):
    code, error = run(base_arguments(model, runs[1]))
    assert code == 2
    assert error.splitlines()[-1].startswith("error: output_dir:") and "Traceback" not in error


def test_fake_data_runs_alone_and_again(model, tmp_path):
    arguments = base_arguments(model, tmp_path, "--data.fake", "{'batch_size': 4, 'seq_len': 16}")
    for _ in range(2):
        code, error = run(arguments)
        assert code == 0, error
    assert len(metrics_of(tmp_path)) == 2 * STEPS
    assert not any(RunPaths(tmp_path).weights_dir.iterdir())


def test_a_missing_batch_ends_the_wait_and_names_the_orchestrator(model, tmp_path):
    ship(tmp_path, steps=1)
    code, error = run(base_arguments(model, tmp_path, "--wait-timeout-seconds", "2"))
    last = error.splitlines()[-1]
    assert code == 1
    assert last.startswith("error: waited 2 s") and "step_1" in last and "orchestrator" in last
    assert "has no heartbeat of orchestrator" in last
    assert [beat.phase for beat in read_beats(RunPaths(tmp_path)).values()] == ["failed"]
    assert "Traceback" not in error


def test_the_wait_for_a_batch_ends_when_the_orchestrator_has_died(tmp_path, monkeypatch):
    """I7, by hand; under `rl` the supervisor alone judges."""
    paths = RunPaths(tmp_path)
    config = TrainerConfig.load(["--heartbeat.timeout", "0.4", "--wait-timeout-seconds", "2"])
    mine, its = Heartbeat(paths, "trainer_0", "trainer"), Heartbeat(paths, "orchestrator", "orchestrator")
    its.start()
    its.close("failed")
    publisher = SimpleNamespace(check=lambda: None)
    with pytest.raises(PeerLost, match=rf"orchestrator \(pid {os.getpid()} on .*\) has failed"):
        batch_source(config, paths, None, publisher, mine)(7)
    assert mine._phase[:3] == ("wait for batch 7", 2, "orchestrator")
    monkeypatch.setenv(SUPERVISED, "1")
    with pytest.raises(DeadlineError, match=r"waited 2 s for .*; orchestrator \(pid .* has failed"):
        batch_source(config, paths, None, publisher, mine)(7)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["--model.name", "/no/such/model"], "model.name"), (["--device", "cuda"], "device"), (["--lr", "1"], "lr")],
)
def test_bad_input_is_one_line(model, tmp_path, arguments, key):
    import torch

    if key == "device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, error = run([*base_arguments(model, tmp_path), *arguments])
    assert code == 2
    assert error.splitlines()[-1].startswith("error: ") and key in error and "Traceback" not in error


def test_an_orchestrator_with_another_bound_is_refused(model, tmp_path):
    ship(tmp_path, steps=1)
    code, error = run(base_arguments(model, tmp_path, "--async-level", "1"))
    assert code == 2
    assert error.splitlines()[-1].startswith("error: async_level = 1 here and 2 at the orchestrator")
    assert "Traceback" not in error
    assert not RunPaths(tmp_path).weights_dir.exists()


def test_the_death_of_a_rank_ends_the_other(model, tmp_path):
    ship(tmp_path, steps=1)
    with start_torchrun(2, base_arguments(model, tmp_path, "--wait-timeout-seconds", "100")) as p:
        try:
            wait_for(RunPaths(tmp_path).weights(1), 60, "the trainer")
            ranks = [c for c in psutil.Process(p.pid).children() if "train.py" in " ".join(c.cmdline())]
            assert len(ranks) == 2
            ranks[1].send_signal(signal.SIGKILL)
            begin = time.monotonic()
            p.communicate(timeout=30)
        finally:
            p.kill()
    assert p.returncode != 0
    assert time.monotonic() - begin < 15
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_published_weights_differ_from_the_base(runs, model):
    base, trained = hash_tensors(model), hash_tensors(RunPaths(runs[1]).weights(STEPS))
    assert base.keys() == trained.keys()
    assert np.mean([base[name] != trained[name] for name in base]) > 0.9
