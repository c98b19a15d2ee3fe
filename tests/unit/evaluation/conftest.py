"""Commands that play in real workers, against servers without a model."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.evaluation import offline, synthesis

MODEL = str(Path(__file__).parents[3] / "configs/reverse_text/model")
REVERSE = {"id": "reverse_text", "args": {"words": 8, "eval_examples": 6}}


@pytest.fixture
def evaluate(tmp_path):
    """Coroutine: evaluate the small model's words with more or other keys; returns the results."""

    async def run(url, **keys):
        settings = {
            "client": {"base_url": [url], "timeout_seconds": 60},
            "model": {"name": MODEL},
            "sampling": {"max_tokens": 4},
            "env": [REVERSE],
            "seq_len": 64,
            "output_dir": tmp_path / "out",
            **keys,
        }
        return await asyncio.to_thread(offline.evaluate, EvalConfig.model_validate(settings))

    return run


@pytest.fixture
def synthesize(tmp_path):
    """Coroutine: write samples; returns their file."""

    async def run(url, env, **keys):
        settings = {
            "client": {"base_url": [url], "timeout_seconds": 60},
            "model": {"name": MODEL},
            "sampling": {"max_tokens": 4},
            "env": [env],
            "seq_len": 64,
            "output_dir": tmp_path / "out",
            **keys,
        }
        return await asyncio.to_thread(synthesis.synthesize, SynthesizeConfig.model_validate(settings))

    return run
