"""One server for all tests of switching; each test starts with the base model and a free lease."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl.rollouts.clients.inference_client import InferenceClient
from tests.support.server import REQUEST_TIMEOUT_SECONDS, Server, inference_server
from tests.support.tiny_model import make_tiny_model, publish_weights

SEATS = 16
# Small on purpose: 16 concurrent requests, prefix blocks of 32 tokens, prefill in chunks of 256 tokens.
ARGUMENTS = ["--vllm.max_num_seqs", str(SEATS), "--vllm.block_size", "32", "--vllm.max_num_batched_tokens", "256"]
ARGUMENTS += ["--vllm.enable_chunked_prefill", "true", "--vllm.enable_server_load_tracking", "true"]
METRIC_TIMEOUT_SECONDS = 240  # on a heavily loaded machine; seconds on an idle one
LONG = 1900
"""Tokens that a completion takes seconds for, so that it is in flight while a test switches. The models have 2048."""
SAMPLED = "vllm:generation_tokens_total"
PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]
CANARY = [6 + (7 * i) % 94 for i in range(64)]
AGREEMENT = 1e-4
DIFFERENT = 0.5


@dataclass
class Models:
    """Three policies of one architecture: the base and two that were published as steps 1 and 2."""

    base: Path
    run_dir: Path
    published: dict[int, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("tied")
    base = make_tiny_model(root / "base", seed=0)
    published = {
        step: publish_weights(root / "run", make_tiny_model(root / f"model_{step}", seed=step), step) for step in (1, 2)
    }
    return Models(base, root / "run", published)


@pytest.fixture(scope="session")
def shared_server(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    with inference_server(models.base, log, ARGUMENTS) as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.reload(run_id="tests")
    assert shared_server.post("/release_policy", run_id="tests").status_code == 200
    return shared_server


class Reference:
    """The same policies in Hugging Face Transformers."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}

    def logprobs(self, model_dir: Path, prompt: list[int], completion: list[int]) -> list[float]:
        """Log-probability of each token of `completion`, at temperature 1."""
        import torch
        from transformers import AutoModelForCausalLM

        if model_dir not in self._models:
            # Eager: transformers' sdpa ignores softcapped scores.
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            self._models[model_dir] = AutoModelForCausalLM.from_pretrained(model_dir, **options).eval()
        with torch.no_grad():
            logits = self._models[model_dir](torch.tensor([prompt + completion])).logits[0]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])
        return chosen[:, 0].tolist()

    def canary(self, model_dir: Path) -> dict[str, Any]:
        """The manifest's field `canary`, as published by a trainer of this model."""
        logprobs = self.logprobs(model_dir, CANARY[:1], CANARY[1:])
        return {"canary": {"token_ids": CANARY, "logprobs": logprobs, "dtype": "float32"}}


@pytest.fixture(scope="session")
def reference():
    return Reference()


async def assert_greedy_outputs_equal(left: Server, right: Server, agreement: float = 1e-4) -> None:
    """Twenty prompts of 5 to 200 tokens: equal 48 tokens, with equal log-probabilities."""
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 100) for _ in range(rng.randrange(5, 200))] for _ in range(20)]
    answers, expected = [
        await generate_all(server, [server.request(prompt, max_tokens=48) for prompt in prompts], lambda: None)
        for server in (left, right)
    ]
    for one, other in zip(answers, expected, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert gap(logprobs_of(one), logprobs_of(other)) <= agreement


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def gap(left: list[float], right: list[float]) -> float:
    """The largest difference."""
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def versions_of(choice: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]


def metric(server: Server, name: str) -> float:
    """Sum of a Prometheus metric of the engine over its labels."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((name if "{" in name else f"{name}{{", f"{name} "))
    )


async def generate_all(
    server: Server, requests: list[dict[str, Any]], meanwhile: Callable[[], None]
) -> list[dict[str, Any]]:
    """Send all requests at once, run `meanwhile` in a thread, and return their choices in order."""
    limits = httpx.Limits(max_connections=None)
    headers = server.client.headers
    async with httpx.AsyncClient(
        base_url=server.url, timeout=REQUEST_TIMEOUT_SECONDS, limits=limits, headers=headers
    ) as client:
        sent = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for body in requests]
        await asyncio.to_thread(meanwhile)
        answers = await asyncio.gather(*sent)
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json()["choices"][0] for answer in answers]


async def generate_until_reload(
    server: Server,
    requests: list[dict[str, Any]],
    meanwhile: Callable[[float], None],
    slots: Sequence[dict[str, str]] = ({},),
) -> list[dict[str, Any]]:
    """Send requests of `LONG` tokens, run `meanwhile` in a thread, and end them by `/reload_weights` 500 tokens later.

    Those of a named adapter are not ended.

    Args:
        server: has a seat for each request.
        requests: `max_tokens` is replaced.
        meanwhile: its argument is the metric `SAMPLED` before the requests.
        slots: body of `/reload_weights` for each; the base slot by default.
    """
    before = metric(server, SAMPLED)

    def act() -> None:
        meanwhile(before)
        wait_for_metric(server, SAMPLED, above=metric(server, SAMPLED) + 500)
        for slot in slots:
            server.reload(**slot)

    long = [{**body, "sampling_params": {**body["sampling_params"], "max_tokens": LONG}} for body in requests]
    return await generate_all(server, long, act)


@asynccontextmanager
async def all_seats_taken(server: Server, prompts: list[list[int]]) -> AsyncIterator[None]:
    """Sample `LONG` tokens of each of `SEATS` prompts; the samples are cancelled at the end of the block."""
    assert len(prompts) == SEATS
    sampling = {"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True}
    async with InferenceClient(server.url, server.model, "") as client:
        samples = [asyncio.create_task(client.generate(prompt, sampling)) for prompt in prompts]
        await asyncio.to_thread(wait_for_metric, server, "vllm:num_requests_running", SEATS - 1)
        yield
        for sample in samples:
            assert sample.cancel(), "it was in flight to the end"
        await asyncio.gather(*samples, return_exceptions=True)


def wait_for_metric(server: Server, name: str, above: float) -> None:
    """Poll until the metric is above a value.

    Raises:
        AssertionError: it is not within `METRIC_TIMEOUT_SECONDS`.
    """
    deadline = time.monotonic() + METRIC_TIMEOUT_SECONDS
    while (value := metric(server, name)) <= above:
        assert time.monotonic() < deadline, (
            f"{name} = {value:g} is not above {above:g} after {METRIC_TIMEOUT_SECONDS} s"
        )
        time.sleep(0.01)
