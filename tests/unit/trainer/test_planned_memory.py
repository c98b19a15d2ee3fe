"""The numbers of `plan` against real models on a CPU: parameters, bytes of the state, activations."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from prime_rl.configs.training.model import ActivationCheckpointConfig, LoRAConfig, TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig, MuonConfig, SGDConfig
from prime_rl.orchestrator.packing import RowCost
from prime_rl.supervisor.planning.gpu_table import GIB, GPUS
from prime_rl.supervisor.planning.model_shape import load_shape, shape_of
from prime_rl.supervisor.planning.run_plan import RunPlan, as_json
from prime_rl.supervisor.planning.trainer_plan import TrainerJob, activation_bytes, trainer_memory
from prime_rl.trainer.memory_savings import prepare_blocks
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.device_mesh import local_tensor
from prime_rl.trainer.weight_sync.gather_plan import PublishedStateDict
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.unit.trainer.test_policy_model import ARCHITECTURES, SMALL, pack, save, segments

UNKNOWN = ("gemma4", "gpt_neox", "gpt2", "phi_", "cohere")
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {name: make for name, make in ARCHITECTURES.items() if not name.startswith(UNKNOWN)} | {
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SMALL, **_EXPERTS, n_routed_experts=4, first_k_dense_replace=1, head_dim=16, attention_bias=True
    ),
    "glm4_moe_norms": lambda: transformers.Glm4MoeConfig(
        **SMALL, **_EXPERTS, n_routed_experts=4, n_shared_experts=2, use_qk_norm=True
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SMALL, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=24, decoder_sparse_step=2
    ),
    "llama_biases": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_flops_equal_those_of_transformers(family):
    config = FAMILIES[family]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(family, json.loads(config.to_json_string()))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [block.parameters for block in shape.blocks] == [
        sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers
    ]
    if family in ("qwen3", "mistral_window", "qwen3_moe_some_dense"):
        assert shape.cost == RowCost.of(config.to_dict())


def job(path, tokens, **keys):
    optim = keys.pop("optim", AdamWConfig())
    model = TrainerModelConfig(name=str(path), **keys)
    element = 2 if model.dtype == "bfloat16" else 4
    return TrainerJob(load_shape(str(path)), GPUS["H100"], 1, model, optim, tokens, tokens, element=element)


@pytest.mark.parametrize("optim", [AdamWConfig(), MuonConfig(), SGDConfig()], ids=lambda optim: optim.type)
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4), LoRAConfig(publish="adapter")], ids=["full", "lora", "16"])
def test_state_and_published_bytes_equal_those_of_the_trainer(tiny, world, optim, lora):
    config = TrainerModelConfig(name=str(tiny), lora=lora)
    policy = make_policy(config, 0, world)
    optimizer = build_optimizer(optim, policy)
    policy(pack(segments(128, [40])))[0].sum().backward()
    held = {
        "weights": sum(local_tensor(one).nbytes for one in policy.parameters()),
        "gradients": sum(local_tensor(one.grad).nbytes for one in policy.parameters() if one.grad is not None),
    }
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    held["optimizer"] = sum(local_tensor(value).nbytes for value in values if value.ndim)
    planned_job = job(tiny, 40, lora=lora, optim=optim)
    planned = trainer_memory(planned_job)
    for part, size in held.items():
        assert planned[part] * GIB == pytest.approx(size, rel=0.05), part
    published = PublishedStateDict(policy, torch.bfloat16)
    size = sum(one.numel() * published.host_dtype(name, one).itemsize for name, one in published.tensors().items())
    alone = lora is not None and lora.publish == "adapter"
    version = as_json(RunPlan(planned_job, None, False, 1, 0, None, None, alone, version_element=2))["version"]
    if lora is None or alone:  # otherwise adapters are copied to the host, too, and merged there
        assert version["full_gb"] * 1e9 == pytest.approx(size, rel=0.01)


def saved_bytes(path: Path, tokens: int, **keys) -> int:
    """Bytes that a forward pass saves for the backward pass, besides weights; each memory once."""
    config = TrainerModelConfig(name=str(path), **keys)
    policy = load_policy(config, 0).to(getattr(torch, config.dtype))
    prepare_blocks(policy, config)
    own = {one.untyped_storage()._cdata for one in [*policy.parameters(), *policy.buffers()]}
    held = {}

    def save_tensor(tensor):
        storage = tensor.untyped_storage()
        held[storage._cdata] = tensor  # the reference keeps the address unique
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save_tensor, lambda tensor: tensor):
        policy(pack(segments(64, [tokens])))[0].sum()
    return sum(one.untyped_storage().nbytes() for address, one in held.items() if address not in own)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ac", [None, ActivationCheckpointConfig()], ids=["none", "full"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2_tied", "qwen3_moe"])
def test_activations_are_within_15_percent_of_those_saved(family, ac, dtype, tmp_path):
    config = FAMILIES[family]()
    config.num_hidden_layers = 8  # what is outside of the blocks matters little
    config.layer_types = ["full_attention"] * 8 if getattr(config, "layer_types", None) else None
    save(config, tmp_path)
    tokens = 256
    planned = activation_bytes(job(tmp_path, tokens, ac=ac, dtype=dtype))[0]
    assert planned == pytest.approx(saved_bytes(tmp_path, tokens, ac=ac, dtype=dtype), rel=0.15)
