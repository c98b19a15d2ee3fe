"""Speculative decoding: whatever proposes tokens, those that are sampled are the loaded policy's (I5, I6)."""

import asyncio
import itertools
import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.rollouts.clients.inference_client import InferenceClient
from tests.integration.inference.conftest import PROMPT, gap, generate_all, logprobs_of, metric, versions_of
from tests.support.server import inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]
ARGUMENTS = ["--kv_cache_on_weight_update", "recompute", "--vllm.max_num_seqs", "64"]
ARGUMENTS += ["--vllm.kv_cache_memory_bytes", "64M"]
AGREEMENT = 1e-5
DRAFTS = {
    "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
    **({"suffix": {}} if find_spec("arctic_inference") else {}),  # built from source, so not in the extra `cpu`
    "draft_model": {"model": "base"},  # the base model, also while later versions are loaded
}
TOP_K, LENGTH, SAMPLES, SWITCHES = 4, 4, 25_000, 50


@pytest.fixture(scope="module", params=DRAFTS)
def server(request, models, tmp_path_factory):
    drafts = {"method": request.param, "num_speculative_tokens": 3, **DRAFTS[request.param]}
    if "model" in drafts:
        drafts["model"] = str(models.base)
    arguments = [*ARGUMENTS, "--vllm.speculative_config", json.dumps(drafts)]
    with inference_server(models.base, tmp_path_factory.mktemp("drafts") / "server.log", arguments) as one:
        yield one


def accepted(server):
    return metric(server, "vllm:spec_decode_num_accepted_tokens_total")


def probabilities_of(directory, prompt, temperature):
    """Return the probability of each sequence of LENGTH tokens, by transformers and NumPy."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = {(): 1.0}
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sequence] for sequence in found])).logits[:, -1].double().numpy()
        best = np.argsort(-logits)[:, :TOP_K]
        weights = np.exp(np.take_along_axis(logits, best, 1) / temperature)
        weights /= weights.sum(1, keepdims=True)
        found = {
            (*sequence, int(token)): probability * weight
            for (sequence, probability), tokens, row in zip(found.items(), best, weights, strict=True)
            for token, weight in zip(tokens, row, strict=True)
        }
    return found


async def test_drafts_do_not_change_the_distribution(server, models):
    """100,000 tokens: the frequencies of the 256 possible replies are those of the policy, also after a switch."""
    sampling = {"temperature": 1.5, "top_k": TOP_K, "max_tokens": LENGTH, "ignore_eos": True}
    for step, directory in ((0, models.base), (1, models.published[1])):
        if step:
            server.update(directory, step)
        seen = server.generate(PROMPT, max_tokens=40)["token_ids"]
        prompt, before = [*PROMPT, *seen, *PROMPT], accepted(server)
        async with InferenceClient(server.url, server.model, "") as client:
            limit = asyncio.Semaphore(256)

            async def sample(seed, limit=limit, client=client, prompt=prompt):
                async with limit:
                    return tuple((await client.generate(prompt, {**sampling, "seed": seed})).token_ids.tolist())

            replies = Counter(await asyncio.gather(*map(sample, range(SAMPLES // 2))))
        expected = probabilities_of(directory, prompt, sampling["temperature"])
        assert replies.keys() <= expected.keys()
        pairs = sorted((probability * SAMPLES // 2, replies[reply]) for reply, probability in expected.items())
        rare = [pair for pair in pairs if pair[0] < 10]
        wanted, got = np.array([*pairs[len(rare) :], np.sum(rare, axis=0)] if rare else pairs).T
        freedom = len(wanted) - 1
        chi_square = ((got - wanted) ** 2 / wanted).sum()
        # Wilson and Hilferty (1931): the cube root is about normal; 4 is a probability of 3e-5.
        assert (np.cbrt(chi_square / freedom) - 1 + 2 / (9 * freedom)) / np.sqrt(2 / (9 * freedom)) < 4
        assert accepted(server) > before + 100


async def test_padded_drafts_are_rejected(server, reference):
    """vLLM pads requests with one token to compute with drafts of -1; their first token is that of the prompt."""
    server.reload()
    requests = [server.request([9], temperature=1.0, seed=seed, max_tokens=1 + seed % 5) for seed in range(500)]
    for choice in await generate_all(server, requests, lambda: None):
        expected = reference.logprobs(Path(server.model), [9], choice["token_ids"])
        assert gap(logprobs_of(choice), expected) <= AGREEMENT


async def test_switches_between_draft_and_verification_have_exact_spans(server, models, reference, tmp_path):
    """Each token of completions that many switches interrupt has the log-probability of its own version."""
    server.reload()
    sources = {step: models.published[1 + step % 2] for step in range(1, SWITCHES + 1)}
    canaries = {directory: reference.canary(directory) for directory in models.published.values()}
    published = {
        step: publish_weights(tmp_path, source, step, overrides=canaries[source]) for step, source in sources.items()
    }

    def switch():
        for step, directory in published.items():
            server.update(directory, step)

    before, prompts, switching = accepted(server), [[*PROMPT, 10 + i] for i in range(16)], None
    spans, seeds = set(), itertools.count()
    while switching is None or not switching.done():
        requests = [server.request(p, temperature=1.0, seed=next(seeds), max_tokens=200) for p in prompts]
        switching = switching or asyncio.create_task(asyncio.to_thread(switch))
        for prompt, choice in zip(prompts, await generate_all(server, requests, lambda: None), strict=True):
            for version, start, end in versions_of(choice):
                step = int(version.partition(".")[2])
                directory = sources[step] if step else models.base
                expected = reference.logprobs(directory, prompt, choice["token_ids"])
                assert gap(logprobs_of(choice)[start:end], expected[start:end]) <= AGREEMENT
                spans.add((step, start > 0))
    await switching
    assert len({step for step, interrupts in spans if interrupts}) > SWITCHES / 4
    assert accepted(server) > before
