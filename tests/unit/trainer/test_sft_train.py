"""Supervised fine-tuning as a process: it learns, it repeats itself to the byte, ranks do not show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.run.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.run.paths import RunPaths
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_command

ROOT = Path(__file__).parents[3]
STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model, and a data set of words to be reversed."""
    root = tmp_path_factory.mktemp("inputs")
    make_tiny_model(root / "model", std=0.02)
    words = [f"{a}{b}c" for a in "abcdef" for b in "ghijklm"]
    chats = [[{"role": "user", "content": w}, {"role": "assistant", "content": w[::-1]}] for w in words]
    (root / "words.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return root


def sft(inputs, root, *more, ranks=1):
    arguments = ["--model.name", inputs / "model", "--data.name", inputs / "words.jsonl", "--output-dir", root]
    arguments += ["--data.seq-len", "64", "--data.batch-size", "5", "--optim.lr", "1e-2", "--device", "cpu", *more]
    code, error = run_command("sft", arguments) if ranks == 1 else torchrun(ranks, arguments)
    assert code == 0, error[-3000:]
    return [json.loads(line) for line in RunPaths(root).metrics("trainer").read_text().splitlines()]


def torchrun(ranks, arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [*launcher, str(ROOT / "src/prime_rl/trainer/sft/train.py"), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_the_output_of_each_rank_goes_to_files_and_rank_0_to_the_console(inputs, tmp_path):
    """torchrun's own flags, on the file that the README names."""
    logs, ranks = tmp_path / "logs", 2
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += ["--local-ranks-filter", "0", "--log-dir", str(logs), "--redirects", "3", "--tee", "3"]
    command += [str(ROOT / "src/prime_rl/trainer/sft/train.py"), "--model.name", str(inputs / "model")]
    command += ["--data.type", "fake", "--data.batch-size", "2", "--max-steps", "2", "--device", "cpu"]
    command += ["--output-dir", str(tmp_path / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    console = (done.stdout + done.stderr).splitlines()
    assert any("[default0]" in line or "default0" in line for line in console)
    assert not any("default1" in line for line in console), "rank 1 is filtered out"
    assert {path.parent.name for path in logs.rglob("stderr.log")} == {"0", "1"}


@pytest.fixture(scope="module")
def first(inputs, tmp_path_factory):
    root = tmp_path_factory.mktemp("first")
    return root, sft(inputs, root, "--max-steps", STEPS, "--weights-interval", "4")


def test_it_learns_and_reports(first):
    _, lines = first
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert {"grad_norm", "entropy", "lr", "perf/mfu", "time/train", "tokens"} <= lines[0].keys()


def test_weights_are_published_at_the_interval_and_at_the_end(first):
    root, lines = first
    published = sorted(p.name for p in RunPaths(root).weights_dir.iterdir())
    assert published == ["step_4", "step_6"]
    assert read_manifest(RunPaths(root).weights(6), WEIGHTS_FORMAT)["step"] == 6
    assert "time/publish" in lines[3] and "time/publish" not in lines[4]


def test_the_same_command_gives_the_same_bytes(first, inputs, tmp_path):
    root, lines = first
    again = sft(inputs, tmp_path, "--max-steps", STEPS, "--weights-interval", "4")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    for step in (4, 6):
        one, two = (RunPaths(r).weights(step) / "model.safetensors" for r in (root, tmp_path))
        assert one.read_bytes() == two.read_bytes()


def test_two_ranks_learn_like_one(first, inputs, tmp_path):
    """I9 for supervised fine-tuning, with several rows to a micro-batch on the two ranks."""
    lines = sft(inputs, tmp_path, "--max-steps", STEPS, "--data.micro-batch-size", "2", ranks=2)
    for one, two in zip(first[1], lines, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_without_max_steps_it_goes_once_through_the_data(inputs, tmp_path):
    lines = sft(inputs, tmp_path, "--scheduler.type", "linear", "--data.batch-size", "4")
    assert 1 < len(lines) < 20
    assert RunPaths(tmp_path).weights(len(lines)).exists()
    assert lines[-1]["lr"] < lines[0]["lr"]
