"""The RL trainer as a process: one rank, two ranks, torchrun, and invalid input."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.liveness.peer_monitor import PeerLost
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.batch import ROWS_FILE, write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import DeadlineError, wait_for
from prime_rl.trainer.rl.batch_source import BatchSource, fake_batch
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, alive
from tests.unit.trainer.world import run_command

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "src/prime_rl/trainer/rl/train.py"
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


def start_torchrun(ranks, arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [*launcher, "--local-ranks-filter=0", str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(arguments, ranks=1):
    return run_command("trainer", arguments, ranks=ranks)


def base_arguments(tiny, root, *more):
    fixed = ["--model.name", tiny, "--output-dir", root, "--max-steps", STEPS, "--optim.lr", "1e-3"]
    return [*fixed, "--device", "cpu", "--seed", "0", *more]


def metrics_of(root):
    return [json.loads(line) for line in RunPaths(root).metrics("trainer").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Train the same batches on one rank and on two."""
    roots = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for ranks, root in roots.items():
        ship(root)
        code, error = run(base_arguments(tiny, root, "--num-minibatches", "2"), ranks)
        assert code == 0, error
    return roots


def test_train_reports_and_publishes_every_step(runs):
    for root in runs.values():
        lines = metrics_of(root)
        assert [line["step"] for line in lines] == list(range(STEPS))
        assert all(line.keys() >= METRICS for line in lines)
        assert [line["progress/step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["progress/tokens"] for line in lines] == np.cumsum([line["tokens"] for line in lines]).tolist()
        assert ["grad_norm/layer_0" in line for line in lines] == [True] + [False] * (STEPS - 1), "every tenth step"
        assert lines[0]["grad_norm/layer_0"] < lines[0]["grad_norm"]
        assert all(line["mismatch_kl/on_policy"] == line["mismatch_kl"] > 0 for line in lines)
        for step in range(1, STEPS + 1):
            manifest = read_manifest(RunPaths(root).weights(step), WEIGHTS_FORMAT)
            assert (manifest["branch"], manifest["step"]) == (0, step)
        assert len({read_manifest(RunPaths(root).weights(s), WEIGHTS_FORMAT)["hash"] for s in (1, 2, 3)}) == 3


def test_train_ends_heartbeat_of_every_rank(runs):
    """I7"""
    for ranks, root in runs.items():
        beats = read_heartbeats(RunPaths(root))
        assert list(beats) == [f"trainer_{rank}" for rank in range(ranks)]
        assert {(beat.role, beat.phase) for beat in beats.values()} == {("trainer", "ended")}
        assert all(beat.progress > 6 * STEPS for beat in beats.values())


def test_train_writes_a_timeline_for_every_rank(runs):
    for ranks, root in runs.items():
        paths = RunPaths(root)
        lanes = {f"trainer_{rank}" for rank in range(ranks)} | {"trainer_0_publication"}
        assert {file.stem for file in paths.timeline_dir.iterdir()} == lanes
        lines = [json.loads(line) for line in paths.timeline("trainer_0_publication").read_text().splitlines()]
        assert [(line["name"], line["version"]) for line in lines] == [
            ("write version", step + 1) for step in range(STEPS)
        ]
        for rank in range(ranks):
            lines = [json.loads(line) for line in paths.timeline(f"trainer_{rank}").read_text().splitlines()]
            phases = {(line["name"], line["step"], line["version"]) for line in lines}
            steps = range(STEPS)
            assert phases >= {("step", step, None) for step in steps}
            assert phases >= {("publish version", step, step + 1) for step in steps}
            assert all(after["start"] > before["start"] for before, after in itertools.pairwise(lines))


def test_train_on_two_ranks_equals_one(runs):
    """The world size does not change the metrics (I9)."""
    for one, two in zip(metrics_of(runs[1]), metrics_of(runs[2]), strict=True):
        assert two["tokens"] == one["tokens"]
        assert (one["world_size"], two["world_size"]) == (1, 2)
        assert two["time/step/rank_max"] >= two["time/step/rank_mean"] > 0
        for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "importance_ratio/mean"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_train_deletes_rows_of_earlier_steps_and_keeps_manifests(runs):
    for root in runs.values():
        paths = RunPaths(root)
        assert [(paths.rollouts(n) / ROWS_FILE).exists() for n in range(STEPS)] == [False, False, True]
        assert all((paths.rollouts(n) / "manifest.json").exists() for n in range(STEPS))


def test_train_where_no_timeline_can_be_written_trains(tiny, tmp_path):
    (tmp_path / "timeline").touch()
    code, error = run(base_arguments(tiny, tmp_path, "--data.fake", "--data.fake.seq-len", "16"))
    assert code == 0, error
    assert error.count("timeline: phases are not recorded: File exists") == 2, "the rank's and its publications', once"
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(STEPS))


def test_train_with_weights_of_earlier_run_exits(runs, tiny):
    code, error = run(base_arguments(tiny, runs[1]))
    assert code == 2
    assert error.splitlines()[-1].startswith("error: output_dir:") and "Traceback" not in error


@pytest.mark.extended
def test_train_with_fake_data_runs_twice(tiny, tmp_path):
    arguments = base_arguments(tiny, tmp_path, "--data.fake", "{'batch_size': 4, 'seq_len': 16}")
    for _ in range(2):
        code, error = run(arguments)
        assert code == 0, error
    assert len(metrics_of(tmp_path)) == 2 * STEPS
    assert not any(RunPaths(tmp_path).weights_dir.iterdir())


@pytest.mark.extended
def test_train_without_batch_times_out_and_names_orchestrator(tiny, tmp_path):
    ship(tmp_path, steps=1)
    code, error = run(base_arguments(tiny, tmp_path, "--wait-timeout-seconds", "2"))
    last = error.splitlines()[-1]
    assert code == 1
    assert last.startswith("error: waited 2 s") and "step_1" in last and "orchestrator" in last
    assert "has no heartbeat of orchestrator" in last
    assert [beat.phase for beat in read_heartbeats(RunPaths(tmp_path)).values()] == ["failed"]
    assert "Traceback" not in error


def test_read_with_dead_orchestrator_raises(tmp_path, monkeypatch):
    """I7, by hand; under `rl` the supervisor alone judges."""
    paths = RunPaths(tmp_path)
    patient, brief = (
        TrainerConfig.load(["--heartbeat.dead-after-seconds", "0.4", "--wait-timeout-seconds", seconds])
        for seconds in ("120", "1")
    )
    mine, its = HeartbeatWriter(paths, "trainer_0", "trainer"), HeartbeatWriter(paths, "orchestrator", "orchestrator")
    its.start()
    its.close("failed")
    with pytest.raises(PeerLost, match=rf"orchestrator \(pid {os.getpid()} on .*\) has failed"):
        BatchSource(patient, paths, 0, lambda: None, mine).read(7)
    assert mine._phase[:3] == ("wait for batch 7", 120, "orchestrator")
    monkeypatch.setenv(SUPERVISED, "1")
    with pytest.raises(DeadlineError, match=r"waited 1 s for .*; orchestrator \(pid .* has failed"):
        BatchSource(brief, paths, 0, lambda: None, mine).read(7)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["--model.name", "/no/such/model"], "model.name"), (["--device", "cuda"], "device"), (["--lr", "1"], "lr")],
)
def test_train_with_invalid_input_exits_with_one_line(tiny, tmp_path, arguments, key):
    import torch

    if key == "device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, error = run([*base_arguments(tiny, tmp_path), *arguments])
    assert code == 2
    assert error.splitlines()[-1].startswith("error: ") and key in error and "Traceback" not in error


def test_train_with_another_async_level_exits(tiny, tmp_path):
    ship(tmp_path, steps=1)
    code, error = run(base_arguments(tiny, tmp_path, "--async-level", "1"))
    assert code == 2
    assert error.splitlines()[-1].startswith("error: async_level = 1 here and 2 at the orchestrator")
    assert "Traceback" not in error
    assert not RunPaths(tmp_path).weights_dir.exists()


def test_train_with_other_settings_than_the_orchestrator_does_not_roll_the_run_back(tiny, tmp_path):
    """A trainer that joins a run with wrong settings; the run, whose orchestrator lives, is not changed."""
    paths = RunPaths(tmp_path)
    ship(tmp_path, steps=1)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings={"max_steps": STEPS, "ckpt.interval": 2}):
        code, error = run(base_arguments(tiny, tmp_path, "--ckpt.interval", 1, "--ckpt.resume-step", -1))
        assert code == 2
        assert "error: ckpt.interval = 1 here and 2 at orchestrator (pid " in error.splitlines()[-1]
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path).parts[0] for path in after - set(before)} <= {
        "format.json",
        "heartbeats",
        "timeline",
        "logs",
        "trainer.lock",
    }
    assert set(before) <= after


@pytest.mark.extended  # by default: tests/unit/trainer/test_parallel.py without torchrun, test_whole_run.py with `rl`
def test_death_of_a_rank_ends_the_other(tiny, tmp_path):
    ship(tmp_path, steps=1)
    with start_torchrun(2, base_arguments(tiny, tmp_path, "--wait-timeout-seconds", "280")) as p:
        try:
            wait_for(RunPaths(tmp_path).weights(1), PROGRESS_TIMEOUT_SECONDS, "the trainer")
            ranks = [c for c in psutil.Process(p.pid).children() if "train.py" in " ".join(c.cmdline())]
            assert len(ranks) == 2
            ranks[1].send_signal(signal.SIGKILL)
            p.communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
        finally:
            p.kill()
    assert p.returncode != 0
    assert not any(map(alive, ranks))
