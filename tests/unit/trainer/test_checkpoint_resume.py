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


def fail(outcome, code):
    found, error = outcome
    assert found == code and "Traceback" not in error, error[-3000:]
    line = error.splitlines()[-1]
    assert line.startswith("error: "), error[-3000:]
    return line


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
    """Eight steps of the trainer in one go, with checkpoints along the way."""
    root = tmp_path_factory.mktemp("whole")
    ship(root, 8)
    succeed(trainer(model, root, "--max-steps", "8", "--ckpt.interval", "3"))
    return root


@pytest.fixture(scope="module")
def halves(model, tmp_path_factory):
    """Four steps, then four more, as they are typed."""
    root = tmp_path_factory.mktemp("halves")
    ship(root, 8)
    succeed(trainer(model, root, "--max-steps", "4", "--ckpt"))
    succeed(trainer(model, root, "--max-steps", "8", "--ckpt.resume-step", "4"))
    return root


def test_resumed_rl_is_bit_identical(whole, halves):
    assert metrics_of(halves) == metrics_of(whole)
    assert [line["step"] for line in metrics_of(halves)] == list(range(8))
    assert weights_hash(halves, 8) == weights_hash(whole, 8)
    one, two = (saved_tensors(RunPaths(root).checkpoint(8) / "trainer") for root in (whole, halves))
    assert one.keys() == two.keys() >= {"rng/0"}
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_checkpoints_rows_and_branches_of_a_resumed_run(whole, halves):
    assert find_checkpoints(RunPaths(whole).checkpoints_dir).steps == [3, 6, 8], "each third, and the last"
    assert find_checkpoints(RunPaths(halves).checkpoints_dir).steps == [4, 8]
    rows = [(RunPaths(whole).rollouts(step) / ROWS_FILE).exists() for step in range(8)]
    assert rows == [False] * 3 + [True] * 5, "kept for kept checkpoints"
    manifests = [read_manifest(RunPaths(halves).weights(step), WEIGHTS_FORMAT) for step in (3, 4, 5)]
    assert [manifest["branch"] for manifest in manifests] == [0, 1, 1]
    aside = RunPaths(halves).abandoned(0) / "weights" / "step_4"
    assert read_manifest(aside, WEIGHTS_FORMAT)["hash"] == manifests[1]["hash"]


@pytest.mark.extended
@pytest.mark.parametrize(("ranks", "signalled"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.extended)])
def test_trainer_sigterm_saves_a_checkpoint_from_which_it_resumes(whole, model, tmp_path, ranks, signalled):
    """SIGTERM ends the wait for a batch, on all ranks; the checkpoint is no multiple of the interval."""
    ship(tmp_path, 5)
    stop_in_phase(tmp_path, "wait for batch 5", signalled)
    wait = ["--wait-timeout-seconds", "240"]
    code, error = trainer(model, tmp_path, "--max-steps", "8", "--ckpt.interval", "3", *wait, ranks=ranks)
    assert code == 128 + signal.SIGTERM, error[-3000:]
    assert find_checkpoints(RunPaths(tmp_path).checkpoints_dir).steps == [3, 5]
    assert read_heartbeat(RunPaths(tmp_path).heartbeat("trainer_0")).phase == "ended"
    ship(tmp_path, 8, first=5)
    succeed(trainer(model, tmp_path, "--max-steps", "8", "--ckpt.resume-step", "-1", ranks=ranks))
    if ranks == 1:
        assert metrics_of(tmp_path) == metrics_of(whole)
        assert weights_hash(tmp_path, 8) == weights_hash(whole, 8)


def test_trainer_sigterm_without_checkpoints_exits_at_once(model, tmp_path):
    ship(tmp_path, 1)
    stop_in_phase(tmp_path, "wait for batch 1")
    code, _ = trainer(model, tmp_path, "--max-steps", "8", "--wait-timeout-seconds", "240")
    assert code == -signal.SIGTERM
    assert not RunPaths(tmp_path).checkpoints_dir.exists()


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
def test_kept_batches_reproduce_the_run(model, tmp_path):
    """Neither a commit deletes them nor, without checkpoints, the next step."""
    run, again = tmp_path / "run", tmp_path / "again"
    ship(run, 3)
    succeed(trainer(model, run, "--max-steps", "3", "--keep-batches", "--ckpt.interval", "1"))
    shutil.copytree(run / "rollouts", again / "rollouts")
    succeed(trainer(model, again, "--max-steps", "3", "--keep-batches"))
    for root in (run, again):
        assert all((RunPaths(root).rollouts(step) / ROWS_FILE).exists() for step in range(3))
    assert weights_hash(again, 3) == weights_hash(run, 3)


@pytest.mark.extended
def test_resume_of_earlier_step_archives_later_ones(whole, model, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    shutil.copytree(RunPaths(root).checkpoint(8), RunPaths(root).checkpoint(5))
    (RunPaths(root).checkpoint(5) / COMMITTED).unlink()
    error = succeed(trainer(model, root, "--max-steps", "8", "--ckpt.resume-step", "6", "--ckpt.interval", "3"))
    assert "step_5 is not used: was not finished" in error and "resumed from" in error
    assert metrics_of(root) == metrics_of(whole)
    assert weights_hash(root, 8) == weights_hash(whole, 8)
    aside = RunPaths(root).abandoned(0)
    assert sorted(p.name for p in (aside / "weights").iterdir()) == ["step_6", "step_7", "step_8"]
    assert [p.name for p in (aside / "checkpoints").iterdir()] == ["step_8"]
    assert [json.loads(x)["step"] for x in (aside / "metrics/trainer.jsonl").read_text().splitlines()] == [6, 7]


def test_resume_of_damaged_checkpoint_exits(whole, model, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    shard = next((RunPaths(root).checkpoint(6) / "trainer").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    line = fail(trainer(model, root, "--max-steps", "8", "--ckpt.resume-step", "6"), 1)
    assert str(shard) in line
    assert RunPaths(root).weights(8).exists()  # nothing was put aside


@pytest.mark.extended
def test_resume_of_another_model_or_command_exits(whole, model, words, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    more = ["--max-steps", "8", "--ckpt.resume-step", "6"]
    line = fail(trainer(model, root, *more, "--model.debug.num-layers", "1"), 2)
    assert "model.layers.1" in line and "model.debug.num_layers was None" in line
    line = fail(trainer(model, root, *more, "--optim.type", "muon"), 2)
    assert "optim.type = muon" in line and "adamw" in line
    assert "was written by trainer" in fail(sft(model, words, root, *more), 2)


def test_resume_of_a_missing_step_or_without_resume_step_exits(whole, model):
    line = fail(trainer(model, whole, "--max-steps", "8", "--ckpt.resume-step", "5"), 2)
    assert "5" in line and "3, 6, 8" in line
    assert find_checkpoints(RunPaths(whole).checkpoints_dir).steps == [3, 6, 8]
    assert fail(trainer(model, whole, "--max-steps", "8", "--ckpt"), 2).startswith("error: output_dir:")


def test_invalid_checkpoint_folder_exits_before_first_step(model, tmp_path):
    (tmp_path / "file").touch()
    ship(tmp_path / "run", 1)
    line = fail(trainer(model, tmp_path / "run", "--max-steps", "1", "--ckpt.path", tmp_path / "file"), 2)
    assert line.startswith(f"error: ckpt.path: cannot create {tmp_path / 'file'}")
    assert not RunPaths(tmp_path / "run").metrics("trainer").exists()


@pytest.mark.extended
def test_resume_with_changed_settings_logs_them(halves, model, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(halves, root)
    error = succeed(trainer(model, root, "--max-steps", "5", "--ckpt.resume-step", "4", "--optim.beta1", "0.5"))
    assert "optim.beta1 was 0.9 when the checkpoint was written and is 0.5" in error


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


def steps_of(root):
    return [line["step"] for line in metrics_of(root) if "loss" in line]


@pytest.mark.extended
@pytest.mark.parametrize("changed", [["--data.batch-size", "3"], ["--data.batch-size", "1"], ["--data.seq-len", "48"]])
def test_resumed_sft_pass_with_changed_settings_publishes_at_its_end(model, words, tmp_path, changed):
    """Without max_steps; a decaying schedule ends with the pass."""
    schedule = ["--scheduler.type", "linear", "--data.seq-len", "96"]
    succeed(sft(model, words, tmp_path, *schedule, "--ckpt.interval", "2"))
    total = len(steps_of(tmp_path))
    assert total >= 4
    succeed(sft(model, words, tmp_path, *schedule, "--ckpt.resume-step", "2", *changed))
    steps = steps_of(tmp_path)
    assert steps == list(range(len(steps))) and len(steps) != total
    assert RunPaths(tmp_path).weights(len(steps)).exists()
    rates = [line["lr"] for line in metrics_of(tmp_path) if "lr" in line]
    assert rates[-1] == pytest.approx(1e-2 / len(steps))


@pytest.mark.extended
def test_sft_resumed_at_its_end_publishes_a_missing_version(model, words, tmp_path):
    succeed(sft(model, words, tmp_path, "--max-steps", "3", "--ckpt.interval", "2"))
    line = fail(sft(model, words, tmp_path, "--max-steps", "2", "--ckpt.resume-step", "3"), 2)
    assert "max_steps = 2, but the checkpoint to resume from has completed 3 steps; increase" in line
    assert not RunPaths(tmp_path).weights(2).exists()
    succeed(sft(model, words, tmp_path, "--max-steps", "2", "--ckpt.resume-step", "2"))
    assert RunPaths(tmp_path).weights(2).exists()
    published = weights_hash(tmp_path, 2)
    succeed(sft(model, words, tmp_path, "--max-steps", "2", "--ckpt.resume-step", "2"))
    assert weights_hash(tmp_path, 2) == published


@pytest.mark.extended
def test_sft_resumed_without_parts_trains_the_new_data_from_their_start(model, words, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(words.read_text().splitlines(keepends=True)[::-2]))
    run = tmp_path / "run"
    succeed(sft(model, words, run, "--max-steps", "2", "--ckpt"))
    resume = ["--max-steps", "4", "--ckpt.resume-step", "2"]
    assert f"the contents of {other} (data.name) have changed" in fail(sft(model, other, run, *resume), 2)
    skipped = ["--ckpt.skip-dataloader", "--ckpt.skip-optimizer", "--ckpt.skip-scheduler", "--ckpt.skip-progress"]
    succeed(sft(model, other, run, *resume, *skipped))
    assert steps_of(run) == [0, 1, 2, 3]
    assert [line["progress/step"] for line in metrics_of(run)] == [1, 2, 3, 4]
    assert metrics_of(run)[2]["progress/samples"] < metrics_of(run)[1]["progress/samples"]


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
