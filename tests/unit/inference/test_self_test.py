"""The self-test of the engines: an engine that fails it gives one error at the start."""

import asyncio
import math
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from prime_rl.core.errors import RunError
from prime_rl.inference.routes import make_router
from prime_rl.inference.self_test import run_self_test
from prime_rl.storage.weights.canary import PolicyCanary, canary_tokens
from prime_rl.trainer.policy_canary import canary_row

PLACES = ["data-parallel rank 0", "data-parallel rank 1"]


async def _try(answer: Any, timeout_s: float = 60) -> PolicyCanary:
    async def ask(tokens: tuple[int, ...]) -> list[list[float]]:
        assert len(tokens) == 64
        if callable(answer):
            return await answer()
        return answer

    return await run_self_test(ask, 128, "float32", "a/model", timeout_s, PLACES)


async def test_self_test_returns_the_canary_of_version_zero() -> None:
    canary = await _try([[-1.0] * 63, [-1.0] * 62 + [-1.00005]])
    assert canary.logprobs == (-1.0,) * 63
    assert canary.dtype == "float32"
    assert list(canary.token_ids) == canary_row(128).tokens.flatten().tolist(), "the trainer's tokens"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[math.nan] * 63], "log-probabilities that are not finite in float32; try model.dtype"),
        ([[-1.0] * 63, [-math.inf] * 63], r"not finite in float32 \(data-parallel rank 1\)"),
        (
            [[-1.0] * 63, [-1.0] * 62 + [-1.5]],
            r"a copy of the model \(data-parallel rank 1\): the largest difference .* is 0.5",
        ),
    ],
)
async def test_self_test_with_wrong_logprobs_raises(answer: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        await _try(answer)


async def test_self_test_of_a_dead_engine_raises_one_line() -> None:
    async def die() -> None:
        raise RuntimeError("EngineCore encountered an issue.\nSee the stack trace")

    with pytest.raises(
        RunError, match=r"64 tokens to a/model\) failed: vLLM loaded the model, but cannot run"
    ) as message:
        await _try(die)
    assert "\n" not in str(message.value)
    assert "RuntimeError: EngineCore encountered an issue." in str(message.value)


async def test_self_test_of_a_hanging_engine_raises_after_the_timeout() -> None:
    with pytest.raises(RunError, match=r"no answer within 0 s \(engine_timeout_seconds\)"):
        await _try(asyncio.Event().wait, timeout_s=0.01)


def test_base_canary_route_returns_the_canary() -> None:
    app = FastAPI()
    canary = PolicyCanary(tuple(canary_tokens(128).tolist()), (-1.0,) * 63, "float32")
    server: Any = None
    app.include_router(make_router(server, "model", base_canary=canary, canary_tolerance=0.2))
    answer = TestClient(app).get("/base_canary").json()
    message = {"token_ids": list(canary.token_ids), "logprobs": [-1.0] * 63, "dtype": "float32"}
    assert answer == message | {"tolerance": 0.2}
