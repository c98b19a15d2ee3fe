"""Commands that play in real workers, against servers without a model."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.evaluation import offline, synthesis

MODEL = str(Path(__file__).parents[3] / "configs/reverse_text/model")
REVERSE = {"id": "reverse_text", "args": {"words": 8, "eval_examples": 6}}


def runner(command, config, tmp_path):
    """Coroutine function: run a command with the small model and more or other keys; returns what it returns."""

    async def run(url, **keys):
        settings = {
            "client": {"base_url": [url], "timeout_seconds": 60}, "model": {"name": MODEL}, "env": [REVERSE],
            "sampling": {"max_tokens": 4}, "seq_len": 64, "output_dir": tmp_path / "out", **keys,
        }  # fmt: skip
        return await asyncio.to_thread(command, config.model_validate(settings))

    return run


@pytest.fixture
def evaluate(tmp_path):
    """Evaluate the small model's words; returns the results."""
    return runner(offline.evaluate, EvalConfig, tmp_path)


@pytest.fixture
def synthesize(tmp_path):
    """Write samples of an environment; returns their file."""
    run = runner(synthesis.synthesize, SynthesizeConfig, tmp_path)
    return lambda url, env, **keys: run(url, env=[env], **keys)
