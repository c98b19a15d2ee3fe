"""Supervised fine-tuning as a process: falling loss, determinism, world size."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.configs.sft import SFTConfig
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.data import sft_dataset
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_command

STEPS = 6
VALIDATE = ("--val.fraction", "0.2", "--val.interval", "4")


@pytest.fixture(scope="module")
def inputs(words):
    """A model beside the data set."""
    make_tiny_model(words.parent / "model", std=0.02)
    return words.parent


def sft_arguments(inputs, root, *more):
    arguments = ["--model.name", inputs / "model", "--data.name", inputs / "words.jsonl", "--output-dir", root]
    arguments += ["--data.seq-len", "64", "--data.batch-size", "5", "--optim.lr", "1e-2", "--device", "cpu", *more]
    return list(map(str, arguments))


def sft(inputs, root, *more):
    code, error = run_command("sft", sft_arguments(inputs, root, *more))
    assert code == 0, error[-3000:]
    return metrics_of(root)


def metrics_of(root):
    """Return the lines of training steps and those of validations."""
    lines = [json.loads(line) for line in RunPaths(root).metrics("trainer").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "val/loss" in line]


@pytest.fixture(scope="module")
def first(inputs, tmp_path_factory):
    root = tmp_path_factory.mktemp("first")
    return root, sft(inputs, root, "--max-steps", STEPS, "--weights-interval", "4", *VALIDATE)


def test_sft_reduces_the_losses_validates_and_publishes(first):
    root, (lines, validations) = first
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert {"grad_norm", "entropy", "lr", "perf/mfu", "time/train", "tokens"} <= lines[0].keys()
    assert [line["step"] for line in validations] == [0, 4, STEPS]
    losses = [line["val/loss"] for line in validations]
    assert losses[0] > losses[1] > losses[2]
    assert sorted(path.name for path in RunPaths(root).weights_dir.iterdir()) == ["step_4", "step_6"]
    assert read_manifest(RunPaths(root).weights(6), WEIGHTS_FORMAT)["step"] == 6
    assert "time/publish" in lines[3] and "time/publish" not in lines[4]


def test_validation_loss_is_mean_over_held_out_tokens(first, inputs):
    """Computed anew with transformers alone, example by example, from the published weights."""
    root, (_, validations) = first
    model = AutoModelForCausalLM.from_pretrained(RunPaths(root).weights(STEPS), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    options = {"data": {"type": "sft", "name": str(inputs / "words.jsonl"), "seq_len": 64}, "val": {"fraction": 0.2}}
    held_out = sft_dataset.open_data(SFTConfig(**options), tokenizer).held_out
    total = count = 0
    for sequence in (sequence for row in held_out for sequence in row):
        tokens = torch.from_numpy(sequence.tokens)
        labels = tokens.masked_fill(~torch.from_numpy(sequence.loss_mask), -100)
        learned = int(sequence.loss_mask.sum())
        total += model(tokens[None], labels=labels[None]).loss.item() * learned
        count += learned
    assert validations[-1]["val/loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.extended(after=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.prompt-column", "q", "--data.completion-column", "a"], "words.jsonl:1: there is no column 'q', only"),
        (["--data.seq-len", "4"], "no example has a trained token"),
        (["--data.name", "gone.jsonl"], "error: data.name: gone.jsonl does not exist"),
        (["--val.name", "gone.jsonl"], "error: val.name: gone.jsonl does not exist"),
        (["--data.streaming"], "max_steps: the number of steps of a streaming dataset is unknown"),
    ],
)
def test_sft_with_invalid_input_exits_with_one_line(inputs, tmp_path, arguments, message):
    code, error = run_command("sft", sft_arguments(inputs, tmp_path, *arguments))
    assert code == 2
    assert message in error and "Traceback" not in error
    assert len([line for line in error.splitlines() if " WARNING " not in line]) == 1


@pytest.mark.extended
def test_sft_repeated_gives_equal_bytes(first, inputs, tmp_path):
    root, (lines, validations) = first
    again, validated = sft(inputs, tmp_path, "--max-steps", STEPS, "--weights-interval", "4", *VALIDATE)
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert [line["val/loss"] for line in validated] == [line["val/loss"] for line in validations]
    for step in (4, 6):
        one, two = (RunPaths(r).weights(step) / "model.safetensors" for r in (root, tmp_path))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.extended
def test_sft_on_two_ranks_equals_one(first, inputs, tmp_path):
    """The world size does not change supervised fine-tuning (I9); several rows form a micro-batch on the two ranks."""
    more = ["--max-steps", STEPS, "--data.micro-batch-size", "2", *VALIDATE]
    code, error = run_command("sft", sft_arguments(inputs, tmp_path, *more), ranks=2)
    assert code == 0, error[-3000:]
    _, (ones, validations) = first
    lines, validated = metrics_of(tmp_path)
    for one, two in zip(ones, lines, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    for one, two in zip(validations, validated, strict=True):
        assert two["val/loss"] == pytest.approx(one["val/loss"], rel=1e-4)


def test_sft_without_max_steps_makes_one_pass(inputs, tmp_path):
    lines, _ = sft(inputs, tmp_path, "--scheduler.type", "linear", "--data.batch-size", "8")
    assert 1 < len(lines) < 10
    assert RunPaths(tmp_path).weights(len(lines)).exists()
    assert lines[-1]["lr"] < lines[0]["lr"]
