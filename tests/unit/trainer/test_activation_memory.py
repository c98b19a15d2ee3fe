"""Memory options give the results of a plain model, on one and on two ranks."""

import copy
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # registers the kernel of packed rows
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.model import (
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    TrainerModelConfig,
)
from prime_rl.configs.training.optim import AdamWConfig, MuonConfig, SGDConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer import memory_savings
from prime_rl.trainer.memory_savings import prepare_optimizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.unit.trainer.test_train_step import OBJECTIVE
from tests.unit.trainer.world import run_world

FULL, SELECTIVE = ActivationCheckpointConfig(), ActivationCheckpointConfig(mode="selective")
OFFLOAD = ActivationOffloadConfig(max_inflight_activations=2)
CASES = {
    "full": {"ac": FULL},
    "every second": {"ac": ActivationCheckpointConfig(freq=2)},
    "selective": {"ac": SELECTIVE},
    "offload": {"ac_offloading": OFFLOAD},
    "offload full": {"ac": FULL, "ac_offloading": OFFLOAD},
    "offload selective": {"ac": SELECTIVE, "ac_offloading": OFFLOAD},
    "fsdp_cpu_offload": {"fsdp_cpu_offload": True},
    "optim_cpu_offload": {"optim_cpu_offload": True},
    "keep gathered": {"reshard_after_forward": False},
    "all": {"ac": FULL, "ac_offloading": OFFLOAD, "optim_cpu_offload": True},
}
OPTIMIZERS = {"adamw": AdamWConfig(lr=1e-3), "sgd": SGDConfig(lr=1e-3), "muon": MuonConfig(lr=1e-3)}


@pytest.fixture(scope="module")
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def everything_is_large_enough(monkeypatch):
    monkeypatch.setattr(memory_savings, "_MIN_BYTES", 0)
    monkeypatch.setattr(memory_savings.ActivationOffload.__init__, "__defaults__", (0,))
    monkeypatch.setattr(memory_savings, "_PART_BYTES", 20_000)
    monkeypatch.setattr(memory_savings.offload_state, "__defaults__", (20_000,))


def batch(step):
    config = FakeDataConfig(batch_size=6, seq_len=30, micro_batch_size=2, variable_length=True)
    return fake_batch(config, 103, row_length=60, seed=0, step=step)


def train(path, world, optim=OPTIMIZERS["adamw"], steps=2, **keys):
    """Return loss and gradient norm of each step, and a checksum of each weight after the last step."""
    config = TrainerModelConfig(name=str(path), **keys)
    policy = make_policy(config, 0, world)
    optimizer = prepare_optimizer(build_optimizer(optim, policy), config)
    engine = TrainStep(policy, optimizer, world, max_norm=1.0)
    results = [engine.step(split_batch(batch(n), n, 1, world, 60), OBJECTIVE, 1.0) for n in range(steps)]
    weights = {name: float(p.detach().full_tensor().double().abs().sum()) for name, p in policy.named_parameters()}
    return [(r.loss, r.grad_norm) for r in results], weights


def assert_equal(got, wanted):
    for (loss, norm), (wanted_loss, wanted_norm) in zip(got[0], wanted[0], strict=True):
        assert loss == pytest.approx(wanted_loss, abs=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-6)
    assert got[1] == pytest.approx(wanted[1], rel=1e-6)


@pytest.fixture(scope="module")
def plain(tiny, world):
    return {name: train(tiny, world, optim) for name, optim in OPTIMIZERS.items()}


@pytest.mark.parametrize("case", CASES)
def test_memory_options_give_equal_losses_and_weights(tiny, world, plain, case):
    assert_equal(train(tiny, world, **CASES[case]), plain["adamw"])


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_optimizer_state_on_the_host_gives_equal_results(tiny, world, plain, name):
    assert train(tiny, world, OPTIMIZERS[name], optim_cpu_offload=True) == plain[name]


def train_cases(world, path):
    return {name: train(path, world, **CASES[name]) for name in ("fsdp_cpu_offload", "all")}


@pytest.mark.extended
def test_memory_options_on_two_ranks_give_equal_losses_and_weights(tiny, plain, tmp_path):
    for rank in run_world(2, train_cases, str(tiny), tmp_path):
        for losses, weights in rank.values():
            for (loss, norm), (wanted_loss, wanted_norm) in zip(losses, plain["adamw"][0], strict=True):
                assert (loss, norm) == pytest.approx((wanted_loss, wanted_norm), rel=1e-5, abs=1e-5)
            assert weights == pytest.approx(plain["adamw"][1], rel=1e-5)


class Calls:
    """Counts the matrix products and attention calls of a step."""

    def __init__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        calls = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                calls.products += function is torch.ops.aten.mm.default
                calls.attention += "flash_attention_for_cpu.default" in str(function)
                calls.silu += function is torch.ops.aten.silu.default
                return function(*args, **(kwargs or {}))

        self.products = self.attention = self.silu = 0
        self.mode = Mode


def count(path, **keys):
    from prime_rl.trainer.weights.policy_loading import load_policy

    policy = load_policy(TrainerModelConfig(name=str(path), **keys), 0)
    memory_savings.prepare_blocks(policy, TrainerModelConfig(name=str(path), **keys))
    (minibatch,) = split_batch(batch(0), 0, 1, World(0, 1, torch.device("cpu")), 60)
    calls = Calls()
    with calls.mode():
        policy(minibatch.rows[0])[0].sum().backward()
    return calls


def test_recomputation_restores_the_random_state_only_for_dropout(tiny, world, monkeypatch):
    """With dropout the random numbers are repeated; without, no block reads the generator's state."""
    calls, original = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: calls.append(1) or original())
    plain = train(tiny, world, ac=FULL)
    assert not calls and plain == train(tiny, world)
    dropout = {"lora": {"rank": 4, "dropout": 0.5}}
    results = []
    for ac in (None, FULL):
        torch.manual_seed(3)
        results.append(train(tiny, world, ac=ac, **dropout))
    assert results[0] == results[1] and calls


def test_recomputation_repeats_the_expected_operators(tiny):
    nothing, every, second, selective = (count(tiny, **keys) for keys in ({}, *list(CASES.values())[:3]))
    layers = 2
    assert nothing.silu == layers and every.silu == selective.silu == 2 * layers and second.silu == layers + 1
    assert selective.products == nothing.products < second.products < every.products
    assert selective.attention == nothing.attention < second.attention < every.attention


@pytest.mark.parametrize(
    "operator",
    ["mm.default", "addmm.default", "_scaled_dot_product_flash_attention_for_cpu.default",
     "_scaled_dot_product_cudnn_attention.default", "_flash_attention_forward.default"],
)  # fmt: skip
def test_selective_recomputation_saves_products_and_attention(operator):
    name, overload = operator.split(".")
    packet = getattr(getattr(torch.ops.aten, name), overload)
    assert memory_savings._keep_costly(None, packet) == CheckpointPolicy.MUST_SAVE
    assert memory_savings._keep_costly(None, torch.ops.aten.silu.default) == CheckpointPolicy.PREFER_RECOMPUTE
    assert memory_savings._keep_costly(None, torch.ops.torch_attn._varlen_attn.default) == CheckpointPolicy.MUST_SAVE


def test_offload_copies_activations_and_keeps_weights():
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    offload = memory_savings.ActivationOffload(pin_memory=True, inflight=2, min_bytes=0)
    saved = []
    save = offload._save
    offload._save = lambda kept, tensor: saved.append((tensor, save(kept, tensor))) or saved[-1][1]
    x = torch.randn(4, 8, requires_grad=True)
    y = offload.wrap(block, block.forward)(x * 1)
    weights = {p.data_ptr() for p in block.parameters()}
    for source, kept in saved:
        if source.data_ptr() in weights:
            assert kept is source
        else:
            assert torch.equal(kept.host, source) and kept.host.data_ptr() != source.data_ptr()
    assert {type(kept).__name__ for _, kept in saved} == {"_OffloadedTensor", "Tensor"} or len(saved) > 2
    assert len(offload._leaving) <= 2
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    y.sum().backward()  # a second backward pass loads all tensors again
    assert torch.equal(x.grad, 2 * first)
    wanted = torch.autograd.grad(block(x).sum(), x)[0]
    assert torch.equal(first, wanted)


def test_offload_copies_a_tensor_that_is_saved_twice_once():
    offload = memory_savings.ActivationOffload(pin_memory=False, inflight=4, min_bytes=0)
    x = torch.randn(4, 8)
    one, two = offload._save(set(), x), offload._save(set(), x)
    assert one is two and one.uses == 2
    x.add_(1)  # other values in the same memory
    three = offload._save(set(), x)
    assert three is not one and torch.equal(three.host, x)
    assert offload._load(three).equal(x)


def test_optimizer_offload_updates_in_parts_and_leaves_state_on_the_host():
    parameters = [torch.nn.Parameter(torch.ones(10, 10)) for _ in range(5)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    sizes = []
    optimizer.register_step_pre_hook(lambda o, *_: sizes.append(sum(len(g["params"]) for g in o.param_groups)))
    memory_savings.offload_state(optimizer, part_bytes=800)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    assert sizes == [2, 2, 1] * 2
    assert len(optimizer.param_groups[0]["params"]) == 5
    hosts = list(optimizer.step._host.values())
    state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert len(hosts) == len(state) == 10
    assert {id(v) for v in hosts} == {id(v) for v in state}


def test_optimizer_offload_resumes_from_a_checkpoint():
    def make():
        parameters = [torch.nn.Parameter(torch.full((4, 4), float(i))) for i in range(3)]
        return parameters, torch.optim.AdamW(parameters, lr=0.1, fused=True)

    def step(parameters, optimizer):
        for p in parameters:
            p.grad = p.detach() + 1
        optimizer.step()

    plain, offloaded, resumed = make(), make(), make()
    memory_savings.offload_state(offloaded[1], part_bytes=64)
    memory_savings.offload_state(resumed[1], part_bytes=64)
    for _ in range(2):
        step(*plain)
        step(*offloaded)
    resumed[1].load_state_dict(copy.deepcopy(offloaded[1].state_dict()))
    for mine, theirs in zip(resumed[0], offloaded[0], strict=True):
        mine.data.copy_(theirs.data)
    for pair in (plain, offloaded, resumed):
        step(*pair)
    for a, b, c in zip(plain[0], offloaded[0], resumed[0], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize(
    ("keys", "optim", "named"),
    [
        ({"fsdp_cpu_offload": True}, "muon", ["model.fsdp_cpu_offload", "Muon", "model.optim_cpu_offload"]),
        ({"fsdp_cpu_offload": True, "optim_cpu_offload": True}, "adamw", ["leave out model.optim_cpu_offload"]),
    ],
)
@pytest.mark.parametrize("command", [TrainerConfig, SFTConfig])
def test_memory_options_that_conflict_are_refused(command, keys, optim, named):
    arguments = ["--optim.type", optim] + [f"--model.{key.replace('_', '-')}" for key in keys]
    if command is SFTConfig:
        arguments += ["--data.type", "fake", "--max-steps", "1"]
    with pytest.raises(ConfigError) as caught:
        command.load(arguments)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in named)


def one_graph(plain, path, world, steps, **keys):
    """Train with `fullgraph`, which fails where a segment boundary would end a graph; return the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    losses, _ = train(path, world, steps=steps, compile=CompileConfig(fullgraph=True), **keys)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(losses, plain["adamw"][0], strict=False):
        assert loss == pytest.approx(wanted_loss, abs=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
    return counters["stats"]["unique_graphs"]


@pytest.mark.extended
@pytest.mark.parametrize("keys", [{"ac": FULL}, {"ac": SELECTIVE, "ac_offloading": OFFLOAD}])
def test_compiled_blocks_of_all_row_lengths_share_one_graph(tiny, world, plain, monkeypatch, keys):
    """Uses a back end that generates no code, which would take a minute for each graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    assert len({tuple(batch(n).seq_lens) for n in range(3)}) == 3
    assert one_graph(plain, tiny, world, steps=3, **keys) <= 3


@pytest.mark.release
@pytest.mark.extended  # the test above shows the same without the C++ compiler, which runs for 40 s of processor time
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_code_gives_equal_losses(tiny, world, plain):
    assert one_graph(plain, tiny, world, steps=1, ac=FULL) <= 3
