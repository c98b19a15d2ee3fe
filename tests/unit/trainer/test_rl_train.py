"""The RL trainer as a process: one rank, two ranks, and invalid input."""

import itertools
import json
import os
import re

import numpy as np
import pytest
import torch

from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.liveness.peer_monitor import PeerLost
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.batch import ROWS_FILE, write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.rl.batch_source import BatchSource, fake_batch
from tests.unit.trainer.world import run_command

STEPS = 3
METRICS = {
    "step", "loss", "grad_norm", "entropy", "mismatch_kl", "mismatch_kl/on_policy", "importance_ratio/mean",
    "importance_ratio/clipped", "lr", "time/step", "time/wait_for_batch", "time/train", "time/publish",
    "perf/tokens_per_second", "perf/mfu", "optim/skipped", "tokens", "time", "world_size", "logprob/mean",
    "entropy/q50", "progress/step", "progress/tokens", "progress/samples", "progress/problems", "time/synchronize",
    "time/step/rank_mean", "time/step/rank_max", "time/wait_for_batch/rank_max", "perf/peak_memory_gib/rank_max",
}  # fmt: skip


def ship(root, steps=STEPS, first=0):
    """Write batches as the orchestrator would."""
    config = FakeDataConfig(batch_size=10, seq_len=40, micro_batch_size=2, variable_length=True)
    for step in range(first, steps):
        batch = fake_batch(config, 103, row_length=80, seed=5, step=step)
        write_batch(RunPaths(root).rollouts(step), batch, {"branch": 0, "step": step, "async_level": 2})


def run(arguments, ranks=1):
    return run_command("trainer", arguments, ranks=ranks)


def base_arguments(tiny, root, *more):
    fixed = ["--model.name", tiny, "--output-dir", root, "--max-steps", STEPS, "--optim.lr", "1e-3"]
    return [*fixed, "--device", "cpu", "--seed", "0", *more]


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(root):
    return read_lines(RunPaths(root).metrics("trainer"))


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Train the same batches on one rank and on two."""
    roots = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for ranks, root in roots.items():
        ship(root)
        code, error = run(base_arguments(tiny, root, "--num-minibatches", "2"), ranks)
        assert code == 0, error
    return roots


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_reports_and_publishes_every_step(runs, ranks):
    paths, lines = RunPaths(runs[ranks]), metrics_of(runs[ranks])
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line.keys() >= METRICS for line in lines)
    assert [line["progress/step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["progress/tokens"] for line in lines] == np.cumsum([line["tokens"] for line in lines]).tolist()
    assert ["grad_norm/layer_0" in line for line in lines] == [True] + [False] * (STEPS - 1), "every tenth step"
    assert lines[0]["grad_norm/layer_0"] < lines[0]["grad_norm"]
    assert all(line["mismatch_kl/on_policy"] == line["mismatch_kl"] > 0 for line in lines)
    manifests = [read_manifest(paths.weights(step), WEIGHTS_FORMAT) for step in range(1, STEPS + 1)]
    assert [(manifest["branch"], manifest["step"]) for manifest in manifests] == [(0, 1), (0, 2), (0, 3)]
    assert len({manifest["hash"] for manifest in manifests}) == STEPS
    assert [(paths.rollouts(n) / ROWS_FILE).exists() for n in range(STEPS)] == [False, False, True]
    assert all((paths.rollouts(n) / "manifest.json").exists() for n in range(STEPS))


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_ends_heartbeat_and_timeline_of_every_rank(runs, ranks):
    """I7"""
    paths, names = RunPaths(runs[ranks]), [f"trainer_{rank}" for rank in range(ranks)]
    beats = read_heartbeats(paths)
    assert list(beats) == names
    assert {(beat.role, beat.phase) for beat in beats.values()} == {("trainer", "ended")}
    assert all(beat.progress > 6 * STEPS for beat in beats.values())
    assert {file.stem for file in paths.timeline_dir.iterdir()} == {*names, "trainer_0_publication"}
    written = [(line["name"], line["version"]) for line in read_lines(paths.timeline("trainer_0_publication"))]
    assert written == [("write version", step + 1) for step in range(STEPS)]
    for name in names:
        lines = read_lines(paths.timeline(name))
        phases = {(line["name"], line["step"], line["version"]) for line in lines}
        assert phases >= {("step", step, None) for step in range(STEPS)}
        assert phases >= {("publish version", step, step + 1) for step in range(STEPS)}
        assert all(after["start"] > before["start"] for before, after in itertools.pairwise(lines))


def test_train_on_two_ranks_equals_one(runs):
    """The world size does not change the metrics (I9)."""
    for one, two in zip(metrics_of(runs[1]), metrics_of(runs[2]), strict=True):
        assert two["tokens"] == one["tokens"]
        assert (one["world_size"], two["world_size"]) == (1, 2)
        assert two["time/step/rank_max"] >= two["time/step/rank_mean"] > 0
        for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "importance_ratio/mean"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_train_where_no_timeline_can_be_written_trains(tiny, tmp_path):
    (tmp_path / "timeline").touch()
    code, error = run(base_arguments(tiny, tmp_path, "--data.fake", "{'batch_size': 4, 'seq_len': 16}"))
    assert code == 0, error
    assert error.count("timeline: phases are not recorded: File exists") == 2, "the rank's and its publications', once"
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(STEPS))
    assert not any(RunPaths(tmp_path).weights_dir.iterdir()), "of fake data"


def assert_exits(arguments, message):
    """It exits with code 2 and one line."""
    code, error = run(arguments)
    assert code == 2
    assert re.match(message, error.splitlines()[-1]) and "Traceback" not in error


def test_train_with_weights_of_earlier_run_exits(runs, tiny):
    assert_exits(base_arguments(tiny, runs[1]), "error: output_dir:")


def test_read_with_dead_orchestrator_raises(tmp_path, monkeypatch):
    """I7, standalone; under `rl` the supervisor alone judges."""
    paths = RunPaths(tmp_path)
    patient, brief = (
        TrainerConfig.load(["--heartbeat.dead-after-seconds", "0.1", "--wait-timeout-seconds", seconds])
        for seconds in ("120", "0.2")
    )
    mine, its = HeartbeatWriter(paths, "trainer_0", "trainer"), HeartbeatWriter(paths, "orchestrator", "orchestrator")
    its.start()
    its.close("failed")
    with pytest.raises(PeerLost, match=rf"orchestrator \(pid {os.getpid()} on .*\) has failed"):
        BatchSource(patient, paths, 0, lambda: None, mine).read(7)
    assert mine._phase[:3] == ("wait for batch 7", 120, "orchestrator")
    monkeypatch.setenv(SUPERVISED, "1")
    with pytest.raises(DeadlineError, match=r"waited 0 s for .*; orchestrator \(pid .* has failed"):
        BatchSource(brief, paths, 0, lambda: None, mine).read(7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_train_without_the_device_exits(tiny, tmp_path):
    assert_exits([*base_arguments(tiny, tmp_path), "--device", "cuda"], "error: .*device")


def test_train_with_another_async_level_exits(tiny, tmp_path):
    ship(tmp_path, steps=1)
    arguments = base_arguments(tiny, tmp_path, "--async-level", "1")
    assert_exits(arguments, "error: async_level = 1 here and 2 at the orchestrator")
    assert not RunPaths(tmp_path).weights_dir.exists()


def test_train_with_other_settings_than_the_orchestrator_does_not_roll_the_run_back(tiny, tmp_path):
    """A trainer that joins a run with wrong settings; the run, whose orchestrator lives, is not changed."""
    ship(tmp_path, steps=1)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    settings = {"max_steps": STEPS, "ckpt.interval": 2}
    with HeartbeatWriter(RunPaths(tmp_path), "orchestrator", "orchestrator", settings=settings):
        arguments = base_arguments(tiny, tmp_path, "--ckpt.interval", 1, "--ckpt.resume-step", -1)
        assert_exits(arguments, r"error: ckpt.interval = 1 here and 2 at orchestrator \(pid ")
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    added = {path.relative_to(tmp_path).parts[0] for path in after - before}
    assert before <= after and added <= {"format.json", "heartbeats", "timeline", "logs", "trainer.lock"}
