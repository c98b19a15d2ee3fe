"""In half precision, server and trainer compute the output head and the routers of experts in float32.

The models of these tests have no noise of other layers: attention and, for the head, the MLP write nothing, so the
states are the embeddings. What remains is the head's or the routers' rounding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.integration.inference.conftest import PROMPT, logprobs_of
from tests.integration.inference.test_architectures import SMALL
from tests.support.server import Server, inference_server
from tests.support.tiny_model import make_tiny_model, make_tokenizer, publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

TEMPERATURE = 2.0  # the models are so certain that otherwise no log-probability would depend on the logits
SIZES = {**SMALL, "head_dim": 32}
# Routers of the three kinds of weights: of all experts, of the chosen ones, and of all without normalization.
EXPERTS = {
    "qwen3": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=16, num_experts_per_tok=2),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=16, num_experts_per_tok=2),
}


def sample(server: Server) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts and the server's samples."""
    prompts = [[*PROMPT, 11 * i + 3] for i in range(8)]
    return [(prompt, server.generate(prompt, temperature=TEMPERATURE, seed=0, max_tokens=32)) for prompt in prompts]


def mean_gap(model: Path, dtype: str, samples: list[tuple[list[int], dict[str, Any]]]) -> float:
    """Mean absolute difference of the log-probabilities of the server's samples to those of the trainer's policy."""
    policy = load_policy(TrainerModelConfig(name=str(model)), 0)
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    gaps = []
    for prompt, choice in samples:
        tokens = torch.tensor([*prompt, *choice["token_ids"]])
        sampled = torch.arange(len(tokens)) >= len(prompt)
        with torch.no_grad():
            temperature = np.full(len(tokens), TEMPERATURE, np.float32)
            row = make_micro_batch(tokens.numpy(), sampled.numpy(), [len(tokens)], temperature=temperature)
            logprobs, _ = policy(row)
        gaps.append((logprobs[sampled] - torch.tensor(logprobs_of(choice))).abs())
    return float(torch.cat(gaps).mean())


HALVES = [("bfloat16", False), ("bfloat16", True), ("float16", False)]


def silence(model: Any, *names: str) -> None:
    """Set the weights with these names to zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in names:
                parameter.zero_()


@pytest.mark.parametrize(
    ("dtype", "tied", "more"),
    [
        *[(*kind, more) for kind in HALVES for more in ([], ["--enable_lora", "true"])],
        ("bfloat16", False, ["--parallel.tp", "2"]),
        *[pytest.param(*kind, ["--parallel.tp", "2"], marks=pytest.mark.release) for kind in HALVES[1:]],
    ],
)
def test_logits_are_in_float32(dtype, tied, more, tmp_path):
    """Rounded logits would give a mean difference of 0.004 (bfloat16) or 0.0005 (float16)."""
    for seed, name in enumerate(("base", "published")):
        path = make_tiny_model(tmp_path / name, tie_word_embeddings=tied, seed=seed, std=0.02)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        silence(model, "o_proj", "down_proj")
        with torch.no_grad():
            model.lm_head.weight.mul_(25)  # logits of a standard deviation of 4
            model.model.norm.weight[::2] = -1  # otherwise a tied head repeats the last token
        model.save_pretrained(path)
    version = publish_weights(tmp_path, path, 1)
    arguments = ["--model.dtype", dtype, "--vllm.kv_cache_memory_bytes", "64M", *more]
    with inference_server(tmp_path / "base", tmp_path / "server.log", arguments) as server:
        server.update(version, 1)
        samples = sample(server)
    assert len({token for _, choice in samples for token in choice["token_ids"]}) > 10, "there is nothing to compare"
    assert mean_gap(version, dtype, samples) < (1e-3 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_are_chosen_in_float32(name, dtype, tmp_path):
    """All routers' logits are near 100, where half precision rounds to 0.5 (or 0.06): many would be equal."""
    for seed, directory in enumerate(("base", "published")):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(EXPERTS[name]())
        silence(model, "o_proj")
        with torch.no_grad():
            model.model.embed_tokens.weight.abs_()
            for router in (module for key, module in model.named_modules() if key.endswith(".gate")):
                router.weight.mul_(0.1).add_(2)
        model.save_pretrained(tmp_path / directory)
        make_tokenizer().save_pretrained(tmp_path / directory)
    version = publish_weights(tmp_path, tmp_path / "published", 1)
    arguments = ["--model.dtype", dtype, "--vllm.kv_cache_memory_bytes", "64M"]
    with inference_server(tmp_path / "base", tmp_path / "server.log", arguments) as server:
        server.update(version, 1)
        samples = sample(server)
    assert mean_gap(version, dtype, samples) < 0.1
