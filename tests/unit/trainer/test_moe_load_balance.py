"""Load balance metrics equal explicit counts and do not depend on the world size (I9)."""

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.micro_batch import masked_row
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.support.tiny_model import make_tokenizer
from tests.unit.trainer.test_policy_model import SMALL, pack, segments

EXPERTS, CHOSEN, LAYERS = 8, 2, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    config = transformers.Qwen3MoeConfig(
        **{**SMALL, "vocab_size": 128}, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        moe_intermediate_size=16, mlp_only_layers=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def by_hand(path, parts):
    """The metrics from transformers' own router logits, in NumPy."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    violation, idle, confidence = [], [], []
    with torch.no_grad():
        logits = [model(torch.from_numpy(p)[None], output_router_logits=True).router_logits for p in parts]
    for layer in zip(*logits, strict=True):
        z = np.concatenate([x.reshape(-1, EXPERTS).numpy() for x in layer]).astype(np.float64)
        weights = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        best = np.argsort(-weights, axis=1)[:, :CHOSEN]
        load = np.bincount(best.ravel(), minlength=EXPERTS)
        kept = np.take_along_axis(weights, best, 1)
        violation.append(load.max() / load.mean() - 1)
        idle.append((load == 0).mean())
        confidence.append((kept[:, 0] / kept.sum(1)).mean())
    values = map(np.mean, (violation, idle, confidence))
    return dict(zip(("moe/max_violation", "moe/idle_experts", "moe/routing_confidence"), values, strict=True))


def test_metrics_equal_explicit_counts(mixture):
    policy = load_policy(TrainerModelConfig(name=str(mixture)), seed=0)
    parts = segments(128)[:2]
    for part in parts:
        policy(pack([part]))
    policy(masked_row())
    with torch.no_grad():
        policy(pack(segments(128)))  # validation
    metrics = policy.routing.reduce(lambda counts: counts, CPU)
    assert metrics == pytest.approx(by_hand(mixture, parts), rel=1e-5)
    assert metrics["moe/max_violation"] > 0 and 1 / CHOSEN < metrics["moe/routing_confidence"] < 1
    assert set(policy.routing.reduce(lambda counts: counts, CPU).values()) == {None}


def test_dense_model_has_no_metrics(tiny):
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    policy(pack(segments(64)))
    assert policy.routing.reduce(lambda counts: counts, CPU) == {}


FAMILIES = {
    "Qwen3MoeConfig": {"num_experts": 4},
    "Qwen2MoeConfig": {"num_experts": 4},
    "MixtralConfig": {"num_local_experts": 4},
    "OlmoeConfig": {"num_experts": 4},
    "FlexOlmoConfig": {"num_experts": 4},
    "GptOssConfig": {"num_local_experts": 4},
    "GraniteMoeConfig": {"num_local_experts": 4},
    "PhimoeConfig": {"num_local_experts": 4},
    "MiniMaxM2Config": {"num_local_experts": 4},
    "Glm4MoeConfig": {"n_routed_experts": 4},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1},
    "Ernie4_5_MoeConfig": {"moe_num_experts": 4, "moe_layer_start_index": 0},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2},
    "AfmoeConfig": {"num_experts": 4, "num_dense_layers": 0},
}


class Products(TorchDispatchMode):
    """Records the dtypes of the matrix products of a module."""

    def __init__(self, module):
        super().__init__()
        self.dtypes, self.forward = [], module.forward
        module.forward = self.run

    def run(self, *arguments):
        with self:
            return self.forward(*arguments)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "linear"):
            self.dtypes.append(args[-1].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_half_precision_models_multiply_in_float32(family):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = getattr(transformers, family)(**sizes, **FAMILIES[family])
    config.update({"moe_intermediate_size": 16, "first_k_dense_replace": 0})
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    causal_lm = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    PolicyModel(causal_lm)
    blocks = [module for module in causal_lm.modules() if "experts" in module._modules]
    routers = [block._modules.get("gate", block._modules.get("router")) for block in blocks]
    products = list(map(Products, routers))
    before = {name: id(parameter) for name, parameter in causal_lm.named_parameters()}
    causal_lm(torch.arange(8)[None]).logits.float().square().sum().backward()
    assert [product.dtypes for product in products] == [[torch.float32]] * 2
    assert {name: id(parameter) for name, parameter in causal_lm.named_parameters()} == before
    weights = [parameter for router in routers for parameter in router.parameters() if parameter.grad is not None]
    assert len(weights) >= 2 and all(weight.grad.dtype == weight.dtype for weight in weights)
