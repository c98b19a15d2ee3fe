"""Switches in the middle of many completions: I5 spans tell the truth, I6 log-probabilities agree span by span.

Under `kv_on_switch = recompute` a token is sampled by one policy alone, whatever was sampled before it, so each span
must agree with a forward pass of its version. Under `keep` that holds for completions of one version.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from prime_rl.orchestrator.engine import Generation, _Answer, _generation
from prime_rl.orchestrator.packing import pack
from prime_rl.types import Group, PolicyVersion, Rollout, Sample
from tests.integration.inference.conftest import (
    Models,
    Reference,
    gap,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import Server, inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

AGREEMENT = 1e-4
DIFFERENT = 0.5
REQUESTS = 200
TOKENS = 520
PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]


@pytest.fixture(scope="module")
def recomputing(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("recomputing") / "server.log"
    arguments = ["--kv_on_switch", "recompute", "--vllm.max_num_seqs", "64", "--vllm.kv_cache_memory_bytes", "64M"]
    with inference_server(models.base, log, arguments) as server:
        yield server


@pytest.fixture
def policies(models: Models, tmp_path: Path) -> dict[str, Path]:
    """Directory by version: the base, and three that are published here."""
    sources = {1: models.published[1], 2: models.published[2], 3: models.published[1]}
    published = {f"0.{step}": publish_weights(tmp_path, source, step) for step, source in sources.items()}
    return {"0.0": models.base, **published}


async def _play(server: Server, requests: list[dict[str, Any]], meanwhile: Callable[[], None]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=500, limits=limits) as client:
        sent = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for body in requests]
        await asyncio.to_thread(meanwhile)
        return list(await asyncio.gather(*sent))


async def _play_across_switches(
    server: Server, policies: dict[str, Path], prompts: list[list[int]]
) -> list[tuple[dict[str, Any], Generation]]:
    """Sample a completion of each prompt while three versions come, and check what every answer says of its versions.

    Returns:
        For each prompt the choice as vLLM wrote it, and as the orchestrator read it.
    """
    start = metric(server, "vllm:generation_tokens_total")

    def switch() -> None:
        for step in (1, 2, 3):
            wait_for_metric(server, "vllm:generation_tokens_total", above=start + step * len(prompts) * TOKENS / 8)
            server.update(policies[f"0.{step}"], step)

    requests = [server.request(prompt, max_tokens=TOKENS, temperature=1.0, seed=i) for i, prompt in enumerate(prompts)]
    played = []
    for answer in await _play(server, requests, switch):
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        spans = versions_of(choice)
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == TOKENS
        # What the client knows without the spans: what was loaded when it asked, and when it was answered.
        first, last = (answer.headers[name] for name in ("x-policy-version", "x-policy-version-end"))
        assert first <= spans[0][0] <= spans[-1][0] <= last
        played.append((choice, _generation(msgspec.json.decode(answer.content, type=_Answer).choices[0], TOKENS, None)))
    assert {spans[-1][0] for spans in (versions_of(choice) for choice, _ in played)} >= {"0.3"}
    return played


def _assert_trained_versions(played: list[tuple[dict[str, Any], Generation]], prompts: list[list[int]]) -> None:
    """The version of every token in the batch that is written for the trainer is that of the engine's span."""
    groups, expected = [], {}
    for number, ((choice, generation), prompt) in enumerate(zip(played, prompts, strict=True)):
        size = len(prompt)
        sample = Sample(
            tokens=np.array([*prompt, *generation.token_ids], np.int32),
            loss_mask=np.array([False] * size + [True] * TOKENS),
            logprobs=np.concatenate([np.zeros(size, np.float32), generation.logprobs]),
            versions=np.concatenate([np.full(size, -1, np.int32), generation.versions]),
        )
        groups.append(Group(number, (Rollout((sample,), 1.0, {}, False, ()),), "env", number, 1.0))
        spans = versions_of(choice)
        expected[number] = [PolicyVersion.parse(v).step for v, start, end in spans for _ in range(start, end)]
    batch = pack(groups, [np.zeros(1) for _ in groups], seq_len=1024)
    starts = np.concatenate([[0], np.cumsum(batch.seq_lens)])
    for index, number in enumerate(batch.sample_group):
        versions = batch.versions[starts[index] : starts[index + 1]]
        assert versions[versions >= 0].tolist() == expected[int(number)]


def _agree(choice: dict[str, Any], prompt: list[int], policies: dict[str, Path], reference: Reference) -> float:
    """The largest difference of a span to its own version's forward pass."""
    expected = {
        version: reference.logprobs(policies[version], prompt, choice["token_ids"])
        for version, _, _ in versions_of(choice)
    }
    measured = logprobs_of(choice)
    return max(gap(measured[start:end], expected[version][start:end]) for version, start, end in versions_of(choice))


async def test_recomputed_spans_agree_with_their_own_version(
    recomputing: Server, policies: dict[str, Path], reference: Reference
) -> None:
    prompts = [[*PROMPT, 6 + i % 90, 6 + i // 90] for i in range(REQUESTS)]
    preempted = metric(recomputing, "vllm:num_preemptions_total")
    played = await _play_across_switches(recomputing, policies, prompts)
    assert metric(recomputing, "vllm:num_preemptions_total") >= preempted + 3 * 32
    straddling = [choice for choice, _ in played if len(versions_of(choice)) > 1]
    assert len(straddling) >= 64
    for (choice, _), prompt in zip(played, prompts, strict=True):
        assert _agree(choice, prompt, policies, reference) <= AGREEMENT
    _assert_trained_versions(played, prompts)


async def test_kept_completions_of_one_version_agree_with_it(
    server: Server, policies: dict[str, Path], reference: Reference
) -> None:
    prompts = [[*PROMPT, 6 + i] for i in range(80)]
    played = await _play_across_switches(server, policies, prompts)
    pure = [(choice, prompt) for (choice, _), prompt in zip(played, prompts, strict=True) if _is_pure(choice)]
    mixed = [(choice, prompt) for (choice, _), prompt in zip(played, prompts, strict=True) if not _is_pure(choice)]
    assert len(pure) >= 16
    for choice, prompt in pure:
        assert _agree(choice, prompt, policies, reference) <= AGREEMENT
    assert max(_agree(choice, prompt, policies, reference) for choice, prompt in mixed) > DIFFERENT, (
        "tokens after a switch rest on KV of the old weights: that is what `keep` means"
    )
    _assert_trained_versions(played, prompts)


def _is_pure(choice: dict[str, Any]) -> bool:
    return len(versions_of(choice)) == 1
