"""Worlds of up to 1024 ranks on torch's fake process group: what each rank holds, gathers and reads from disk."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import MixtralConfig, Qwen3MoeConfig

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import build_policy
from prime_rl.trainer.parallel.device_mesh import Layout, local_tensor
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weights.hf_weights import HFWeights
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.unit.trainer.test_parallel import make_variant

CPU = torch.device("cpu")
LARGE = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
# The shapes of Qwen3-30B-A3B, with one of its 48 layers and a small vocabulary.
A3B = {**LARGE, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 1}


@contextmanager
def fake_world(config, ranks, rank):
    _clear_sharding_prop_cache()  # it keeps the mesh of an earlier rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield World(rank, ranks, CPU, Layout.of(config, ranks).model_parallel_size)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    Qwen3MoeConfig(vocab_size=1024, architectures=["Qwen3MoeForCausalLM"], **A3B).save_pretrained(root / "a3b")
    make_variant(root / "qwen3", Qwen3MoeConfig, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    make_variant(root / "mixtral", MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
    return root


def share_of(model, ranks, rank, **keys):
    """Return the elements that a rank holds of the experts, and the elements of the experts that it gathers at once."""
    config = TrainerModelConfig(name=str(model), **keys)
    with fake_world(config, ranks, rank) as world:
        policy = shard_policy(build_policy(config), config, world)
        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        stacks = [one for group in groups for one in group.fsdp_params if one.sharded_param.ndim == 3]
        held = sum(local_tensor(one.sharded_param).numel() for one in stacks)
        return held, sum(one._sharded_param_data.numel() * one.mesh_info.shard_mesh_size for one in stacks)


EXPERTS = 128 * 3 * 768 * 2048


@pytest.mark.parametrize("ranks", [3, 48, 1024])
def test_experts_are_divided_evenly_where_the_ranks_divide_any_dimension(models, ranks, said):
    shares = [share_of(models / "a3b", ranks, rank) for rank in {0, ranks - 1}]
    assert set(shares) == {(EXPERTS // ranks, EXPERTS)} and said() == []


@pytest.mark.parametrize(
    ("ranks", "keys", "factor"),
    [
        (40, {}, 1.25),
        (256, {"reshard_ranks": 8}, 2),  # FSDP cannot reshard other dimensions than the first to fewer ranks
        (160, {"ep": 32}, 1.25),
        (160, {"ep": 32, "dp_replicate": 5}, 1),
    ],
)
def test_padded_experts_are_logged_in_one_line(models, ranks, keys, factor, said):
    first, last = (share_of(models / "a3b", ranks, rank, **keys) for rank in (0, ranks - 1))
    assert first[1] == last[1] == pytest.approx(EXPERTS // keys.get("ep", 1) * factor, rel=0.01)
    assert first[0] * ranks // keys.get("dp_replicate", 1) == pytest.approx(EXPERTS * factor, rel=0.01)
    assert (first == last) == (factor == 1)
    assert len(said()) == (factor > 1.1)
    assert all(f"FSDP gathers {factor:.1f} times their size" in line and "model.ep" in line for line in said())


class CountedSlice:
    """Counts the elements that are read of a tensor in a file."""

    def __init__(self, source, reads):
        self.source, self.reads = source, reads

    def get_shape(self):
        return self.source.get_shape()

    def __getitem__(self, ranges):
        part = self.source[ranges]
        self.reads.append(part.numel())
        return part


@pytest.mark.extended(after=3)
@pytest.mark.parametrize(
    ("name", "ranks", "keys"),
    [
        ("qwen3", 12, {"ep": 2, "tp": 2}),
        ("mixtral", 3, {}),
        ("qwen3", 24, {"dp_replicate": 2}),
        ("mixtral", 160, {}),
        ("qwen3", 32, {"ep": 4, "dp_replicate": 2}),
        ("qwen3", 24, {"cp": {"degree": 2}}),
    ],
)
def test_each_rank_reads_exactly_the_elements_that_it_holds(models, name, ranks, keys, monkeypatch):
    reads = []
    lazy = HFWeights._lazy
    monkeypatch.setattr(HFWeights, "_lazy", lambda weights, name: CountedSlice(lazy(weights, name), reads))
    config = TrainerModelConfig(name=str(models / name), **keys)
    for rank in sorted({0, 1 % ranks, ranks // 2, ranks - 1}):
        reads.clear()
        with fake_world(config, ranks, rank) as world:
            policy = make_policy(config, 0, world)
            assert sum(reads) == sum(local_tensor(parameter).numel() for parameter in policy.parameters())
