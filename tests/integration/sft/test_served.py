"""Inference serves a model that `sft` published; it gives the trained answers, with the chat template."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.storage.paths import RunPaths
from tests.support.server import Server, inference_server
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 80
ANSWERS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "acht minus drei"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run that memorizes a few questions and answers."""
    root = tmp_path_factory.mktemp("sft")
    model = make_tiny_model(root / "model", std=0.02)
    rows = [{"question": question, "answer": answer} for question, answer in ANSWERS.items()]
    (root / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    command = [sys.executable, "-m", "prime_rl.trainer.sft.train", "--model.name", str(model), "--device", "cpu"]
    command += ["--data.name", str(root / "words.jsonl"), "--data.as-messages", "--data.seq-len", "256"]
    command += ["--data.batch-size", "2", "--val.interval", "40", "--val.fraction", "0.2"]
    command += ["--max-steps", str(STEPS), "--optim.lr", "1e-2", "--output-dir", str(root / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return RunPaths(root / "out")


@pytest.fixture(scope="module")
def served(run: RunPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with inference_server(run.weights(STEPS), tmp_path_factory.mktemp("served") / "server.log") as server:
        yield server


def test_served_model_gives_the_trained_answers(served: Server, run: RunPaths) -> None:
    assert Path(served.model) == run.weights(STEPS)
    for question, answer in ANSWERS.items():
        message = {"role": "user", "content": question}
        reply = served.post(
            "/v1/chat/completions", model=served.model, messages=[message], temperature=0, max_tokens=32
        )
        choice = reply.raise_for_status().json()["choices"][0]
        assert choice["message"]["content"] == answer
        assert choice["finish_reason"] == "stop", "the end of the turn was trained, too"
