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


def test_dense_model_has_no_metrics(tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    policy(pack(segments(64)))
    assert policy.routing.reduce(lambda counts: counts, CPU) == {}


class Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "linear"):
            self.dtypes.append(args[-1].dtype)
        return function(*args, **(kwargs or {}))


FAMILIES = {
    "Qwen3MoeConfig": {"num_experts": 4, "moe_intermediate_size": 16},
    "Qwen2MoeConfig": {"num_experts": 4, "moe_intermediate_size": 16},
    "MixtralConfig": {"num_local_experts": 4},
    "OlmoeConfig": {"num_experts": 4},
    "FlexOlmoConfig": {"num_experts": 4},
    "GptOssConfig": {"num_local_experts": 4, "head_dim": 8},
    "GraniteMoeConfig": {"num_local_experts": 4},
    "PhimoeConfig": {"num_local_experts": 4},
    "MiniMaxM2Config": {"num_local_experts": 4, "head_dim": 8},
    "Glm4MoeConfig": {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 0, "head_dim": 8},
    "Dots1Config": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
    },
    "Ernie4_5_MoeConfig": {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "AfmoeConfig": {"num_experts": 4, "moe_intermediate_size": 16, "num_dense_layers": 0, "head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_half_precision_models_multiply_in_float32(family):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = getattr(transformers, family)(**sizes, **FAMILIES[family])
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    causal_lm = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    PolicyModel(causal_lm)
    routers = {}
    for block in (module for module in causal_lm.modules() if "experts" in module._modules):
        router, products = block._modules.get("gate", block._modules.get("router")), Products()
        router.forward = within(products, router.forward)
        routers[router] = products
    before = {name: id(parameter) for name, parameter in causal_lm.named_parameters()}
    causal_lm(torch.arange(8)[None]).logits.float().square().sum().backward()
    assert [products.dtypes for products in routers.values()] == [[torch.float32]] * 2
    assert {name: id(parameter) for name, parameter in causal_lm.named_parameters()} == before
    weights = [parameter for router in routers for parameter in router.parameters() if parameter.grad is not None]
    assert len(weights) >= 2 and all(weight.grad.dtype == weight.dtype for weight in weights)


def within(mode, forward):
    def run(*arguments):
        with mode:
            return forward(*arguments)

    return run


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_router_in_float32_is_compiled_with_its_block_in_one_graph(backend):
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, vocab_size=32,
    )  # fmt: skip
    causal_lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    PolicyModel(causal_lm)
    block, states = causal_lm.model.layers[0].mlp, torch.randn(1, 7, 32, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(block.forward, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(states), block(states), rtol=0, atol=0)
