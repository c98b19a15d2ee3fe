"""A resumed run is bit-identical: `trainer` on recorded batches, and `sft`, as commands."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.checkpoint_artifacts import COMMITTED, find_checkpoints
from prime_rl.storage.paths import RunPaths
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_rl_train import ship
from tests.unit.trainer.world import run_command

TIMES = ("time/", "perf/", "publish/", "weight_sync/")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), std=0.05)


def trainer(model, root, *more, **keys):
    arguments = ["--model.name", model, "--output-dir", root, "--optim.lr", "1e-2", "--num-minibatches", "2"]
    return run_command("trainer", [*arguments, "--device", "cpu", "--wait-timeout-seconds", "5", *more], **keys)


def stop_in_phase(root, phase, rank=0):
    """Send SIGTERM to a rank as soon as the phase of its heartbeat starts so."""

    def stop():
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            beat = read_heartbeat(RunPaths(root).heartbeat(f"trainer_{rank}"))
            if beat is not None and beat.phase.startswith(phase):
                os.kill(beat.pid, signal.SIGTERM)
                return
            time.sleep(0.02)

    threading.Thread(target=stop, daemon=True).start()


def sft(model, words, root, *more):
    arguments = ["--model.name", model, "--data.name", words, "--output-dir", root, "--data.seq-len", "64"]
    return run_command("sft", [*arguments, "--data.batch-size", "2", "--optim.lr", "1e-2", "--device", "cpu", *more])


def succeed(outcome):
    code, error = outcome
    assert code == 0, error[-3000:]
    return error


def metrics_of(root):
    lines = [json.loads(line) for line in RunPaths(root).metrics("trainer").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES) and k != "time"} for line in lines]


def saved_tensors(part):
    """All that a checkpoint holds: weights, moments, generators."""
    entries = dcp.FileSystemReader(part).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(part), no_dist=True)
    return tensors


def weights_hash(root, step):
    return read_manifest(RunPaths(root).weights(step), WEIGHTS_FORMAT)["hash"]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Five steps of the trainer in one go, with checkpoints along the way."""
    root = tmp_path_factory.mktemp("whole")
    ship(root, 5)
    succeed(trainer(model, root, "--max-steps", "5", "--ckpt.interval", "2"))
    return root


def test_resumed_rl_is_bit_identical_and_archives_later_steps(whole, model, tmp_path):
    paths = RunPaths(tmp_path / "run")
    shutil.copytree(whole, paths.root)
    paths.checkpoint(4).rename(paths.checkpoint(3))
    (paths.checkpoint(3) / COMMITTED).unlink()
    error = succeed(trainer(model, paths.root, "--max-steps", "5", "--ckpt.resume-step", "2", "--ckpt.interval", "2"))
    assert "step_3 is not used: was not finished" in error and "resumed from" in error
    assert metrics_of(paths.root) == metrics_of(whole)
    assert [line["step"] for line in metrics_of(whole)] == list(range(5))
    assert weights_hash(paths.root, 5) == weights_hash(whole, 5)
    one, two = (saved_tensors(RunPaths(root).checkpoint(5) / "trainer") for root in (whole, paths.root))
    assert one.keys() == two.keys() >= {"rng/0"}
    assert [name for name in one if not torch.equal(one[name], two[name])] == []

    versions = [read_manifest(paths.weights(step), WEIGHTS_FORMAT)["branch"] for step in (1, 2, 5)]
    assert versions == [0, 1, 1]
    aside = paths.abandoned(0)
    assert sorted(path.name for path in (aside / "weights").iterdir()) == ["step_2", "step_3", "step_4", "step_5"]
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step_3", "step_5"]
    assert [json.loads(x)["step"] for x in (aside / "metrics/trainer.jsonl").read_text().splitlines()] == [2, 3, 4]


def test_checkpoints_and_their_rows_are_kept_at_each_interval_and_the_end(whole):
    assert find_checkpoints(RunPaths(whole).checkpoints_dir).steps == [2, 4, 5]
    rows = [(RunPaths(whole).rollouts(step) / ROWS_FILE).exists() for step in range(5)]
    assert rows == [False] * 2 + [True] * 3


@pytest.mark.extended(after=1)
@pytest.mark.parametrize(("ranks", "signalled", "resumes"), [(1, 0, False), (1, 0, True), (2, 1, True)])
def test_trainer_sigterm_saves_a_checkpoint_from_which_it_resumes(whole, model, tmp_path, ranks, signalled, resumes):
    """SIGTERM ends the wait for a batch, on all ranks; the checkpoint is no multiple of the interval."""
    ship(tmp_path, 3)
    stop_in_phase(tmp_path, "wait for batch 3", signalled)
    arguments = ["--max-steps", "5", "--ckpt.interval", "2"]
    code, error = trainer(model, tmp_path, *arguments, "--wait-timeout-seconds", "240", ranks=ranks)
    assert code == 128 + signal.SIGTERM, error[-3000:]
    assert find_checkpoints(RunPaths(tmp_path).checkpoints_dir).steps == [2, 3]
    assert read_heartbeat(RunPaths(tmp_path).heartbeat("trainer_0")).phase == "ended"
    if resumes:
        ship(tmp_path, 5, first=3)
        succeed(trainer(model, tmp_path, *arguments, "--ckpt.resume-step", "-1", ranks=ranks))
        assert ranks == 2 or metrics_of(tmp_path) == metrics_of(whole)
        assert ranks == 2 or weights_hash(tmp_path, 5) == weights_hash(whole, 5)


@pytest.mark.extended
def test_sft_sigterm_saves_a_checkpoint_from_which_it_resumes(model, words, tmp_path):
    stop_in_phase(tmp_path / "run", "step")
    code, error = sft(model, words, tmp_path / "run", "--max-steps", "4000", "--ckpt.interval", "5000")
    assert code == 128 + signal.SIGTERM, error[-3000:]
    [step] = find_checkpoints(RunPaths(tmp_path / "run").checkpoints_dir).steps
    last = str(step + 2)
    succeed(sft(model, words, tmp_path / "run", "--max-steps", last, "--ckpt.resume-step", "-1"))
    succeed(sft(model, words, tmp_path / "whole", "--max-steps", last))
    assert weights_hash(tmp_path / "run", step + 2) == weights_hash(tmp_path / "whole", step + 2)


@pytest.mark.extended
def test_kept_batches_are_deleted_by_no_commit(model, tmp_path):
    ship(tmp_path, 3)
    succeed(trainer(model, tmp_path, "--max-steps", "3", "--keep-batches", "--ckpt.interval", "1"))
    assert all((RunPaths(tmp_path).rollouts(step) / ROWS_FILE).exists() for step in range(3))


@pytest.mark.extended
def test_resumed_sft_is_bit_identical(model, words, tmp_path):
    """The halves end in the middle of an epoch, are saved in the background, and keep the last checkpoint only."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    succeed(sft(model, words, whole, "--max-steps", "8"))
    succeed(sft(model, words, halves, "--max-steps", "4", "--ckpt"))
    more = ["--ckpt.save-async", "--ckpt.interval", "1", "--ckpt.keep-last", "1"]
    succeed(sft(model, words, halves, "--max-steps", "8", "--ckpt.resume-step", "4", *more))
    assert metrics_of(halves) == metrics_of(whole)
    assert weights_hash(halves, 8) == weights_hash(whole, 8)
    assert find_checkpoints(RunPaths(halves).checkpoints_dir).steps == [8]
    assert weights_hash(halves, 4) != weights_hash(halves, 8)


@pytest.mark.extended
def test_sft_resumed_at_its_end_publishes_a_missing_version(model, words, tmp_path):
    succeed(sft(model, words, tmp_path, "--max-steps", "3", "--ckpt.interval", "2"))
    assert not RunPaths(tmp_path).weights(2).exists()
    resume = ["--max-steps", "2", "--ckpt.resume-step", "2"]
    succeed(sft(model, words, tmp_path, *resume))
    published = weights_hash(tmp_path, 2)
    succeed(sft(model, words, tmp_path, *resume))
    assert weights_hash(tmp_path, 2) == published


@pytest.mark.extended
def test_resume_restores_random_generators(model, tmp_path):
    """Dropout of adapters is drawn anew in each step; a reference model is loaded by both runs."""
    more = ["--model.lora.rank", "4", "--model.lora.dropout", "0.5", "--loss.kl.coef", "0.1"]
    for name, steps in (("whole", [["4"]]), ("halves", [["2", "--ckpt"], ["4", "--ckpt.resume-step", "2"]])):
        ship(tmp_path / name, 4)
        for arguments in steps:
            succeed(trainer(model, tmp_path / name, *more, "--max-steps", *arguments))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "halves")
    assert weights_hash(tmp_path / "whole", 4) == weights_hash(tmp_path / "halves", 4)
