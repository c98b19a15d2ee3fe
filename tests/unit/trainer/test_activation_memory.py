"""Memory options give the results of a plain model, on one and on two ranks."""

import copy
import shutil
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.attention.varlen  # registers the kernel of packed rows
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

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
from prime_rl.trainer.memory_savings import prepare_blocks, prepare_optimizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.unit.trainer.test_train_step import OBJECTIVE
from tests.unit.trainer.world import run_world

FULL, SELECTIVE = ActivationCheckpointConfig(), ActivationCheckpointConfig(mode="selective")
OFFLOAD = ActivationOffloadConfig(max_inflight_activations=2)
OPTIMIZERS = {"adamw": AdamWConfig(lr=1e-3), "sgd": SGDConfig(lr=1e-3), "muon": MuonConfig(lr=1e-3)}
CASES = {
    "full": ("adamw", {"ac": FULL}),
    "selective": ("adamw", {"ac": SELECTIVE}),
    "offload selective": ("adamw", {"ac": SELECTIVE, "ac_offloading": OFFLOAD}),
    "fsdp_cpu_offload": ("adamw", {"fsdp_cpu_offload": True}),
    "keep gathered": ("adamw", {"reshard_after_forward": False}),
    "all": ("adamw", {"ac": FULL, "ac_offloading": OFFLOAD, "optim_cpu_offload": True}),
    "state of sgd": ("sgd", {"optim_cpu_offload": True}),
    "state of muon": ("muon", {"optim_cpu_offload": True}),
}


@pytest.fixture(autouse=True)
def everything_is_large_enough(monkeypatch):
    monkeypatch.setattr(memory_savings, "_MIN_BYTES", 0)
    monkeypatch.setattr(memory_savings.ActivationOffload.__init__, "__defaults__", (0,))
    monkeypatch.setattr(memory_savings, "_PART_BYTES", 20_000)
    monkeypatch.setattr(memory_savings.offload_state, "__defaults__", (20_000,))


def batch(step):
    config = FakeDataConfig(batch_size=6, seq_len=30, micro_batch_size=2, variable_length=True)
    return fake_batch(config, 103, row_length=60, seed=0, step=step)


def train(path, world, optim="adamw", steps=2, **keys):
    """Return loss and gradient norm of each step, and a checksum of each weight after the last step."""
    config = TrainerModelConfig(name=str(path), **keys)
    policy = make_policy(config, 0, world)
    optimizer = prepare_optimizer(build_optimizer(OPTIMIZERS[optim], policy), config)
    engine = TrainStep(policy, optimizer, world, max_norm=1.0)
    results = [engine.step(split_batch(batch(n), n, 1, world, 60), OBJECTIVE, 1.0) for n in range(steps)]
    weights = {name: float(p.detach().full_tensor().double().abs().sum()) for name, p in policy.named_parameters()}
    return [number for result in results for number in (result.loss, result.grad_norm)], weights


def assert_equal(got, wanted, tolerance=1e-6):
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=tolerance)
    assert got[1] == pytest.approx(wanted[1], rel=tolerance)


@pytest.fixture(scope="module")
def plain(tiny, module_world):
    return {name: train(tiny, module_world, name) for name in OPTIMIZERS}


@pytest.mark.parametrize("case", CASES)
def test_memory_options_give_equal_losses_and_weights(tiny, module_world, plain, case):
    optim, keys = CASES[case]
    assert_equal(train(tiny, module_world, optim, **keys), plain[optim])


def train_cases(world, path):
    return [train(path, world, **CASES[name][1]) for name in ("fsdp_cpu_offload", "all")]


@pytest.mark.extended
def test_memory_options_on_two_ranks_give_equal_losses_and_weights(tiny, plain, tmp_path):
    for results in run_world(2, train_cases, str(tiny), tmp_path):
        for result in results:
            assert_equal(result, plain["adamw"], tolerance=1e-5)


def test_recomputation_restores_the_random_state_only_for_dropout(tiny, module_world, plain, monkeypatch):
    """With dropout the random numbers are repeated; without, no block reads the generator's state."""
    reads, original = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: reads.append(1) or original())
    assert train(tiny, module_world, ac=FULL) == plain["adamw"] and not reads
    results = []
    for ac in (None, FULL):
        torch.manual_seed(3)
        results.append(train(tiny, module_world, steps=1, ac=ac, lora={"rank": 4, "dropout": 0.5}))
    assert results[0] == results[1] and reads


class CountCalls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def count(path, ac):
    """Return how often a step calls matrix products, attention and the activation function."""
    config = TrainerModelConfig(name=str(path), ac=ac)
    policy = load_policy(config, 0)
    prepare_blocks(policy, config)
    (minibatch,) = split_batch(batch(0), 0, 1, World(0, 1, torch.device("cpu")), 60)
    with CountCalls() as calls:
        policy(minibatch.rows[0])[0].sum().backward()
    return [calls.counts[f"aten.{name}.default"] for name in _COUNTED]


_COUNTED = ("mm", "_scaled_dot_product_flash_attention_for_cpu", "silu")


def test_recomputation_repeats_the_expected_operators(tiny):
    modes = (None, FULL, ActivationCheckpointConfig(freq=2), SELECTIVE)
    (products, *nothing), (most, *every), (more, *second), (same, *selective) = (count(tiny, ac) for ac in modes)
    assert (nothing, every, second, selective) == ([4, 2], [8, 4], [6, 3], [4, 4])
    assert products == same < more < most


def test_offload_copies_a_tensor_that_is_saved_twice_once():
    offload = memory_savings.ActivationOffload(pin_memory=False, inflight=4, min_bytes=0)
    x = torch.randn(4, 8)
    one, two = offload._save(set(), x), offload._save(set(), x)
    assert one is two and one.uses == 2
    x.add_(1)  # other values in the same memory
    three = offload._save(set(), x)
    assert three is not one and torch.equal(offload._load(three), x)


def test_optimizer_offload_resumes_from_a_checkpoint():
    def make(offloads):
        parameters = [torch.nn.Parameter(torch.full((4, 4), float(i))) for i in range(3)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        if offloads:
            memory_savings.offload_state(optimizer, part_bytes=64)
        return parameters, optimizer

    def step(parameters, optimizer):
        for parameter in parameters:
            parameter.grad = parameter.detach() + 1
        optimizer.step()

    plain, resumed = make(offloads=False), make(offloads=True)
    step(*plain)
    resumed[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    for mine, theirs in zip(resumed[0], plain[0], strict=True):
        mine.data.copy_(theirs.data)
    for _ in range(2):
        step(*plain)
        step(*resumed)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed[0], plain[0], strict=True))


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        (TrainerConfig, ["--optim.type", "muon"], ["model.fsdp_cpu_offload", "Muon", "model.optim_cpu_offload"]),
        (SFTConfig, ["--data.type", "fake", "--model.optim-cpu-offload"], ["leave out model.optim_cpu_offload"]),
    ],
)
def test_memory_options_that_conflict_are_refused(command, arguments, named):
    with pytest.raises(ConfigError) as caught:
        command.load([*arguments, "--model.fsdp-cpu-offload", "--max-steps", "1"])
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in named)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("backend", "keys"),
    [
        # Generates no code, which takes a minute of processor time for each graph.
        ("aot_eager_decomp_partition", {"ac": FULL}),
        ("aot_eager_decomp_partition", {"ac": SELECTIVE, "ac_offloading": OFFLOAD}),
        pytest.param("inductor", {"ac": FULL}, marks=[pytest.mark.release, pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_compiled_blocks_of_all_row_lengths_share_one_graph(tiny, module_world, plain, monkeypatch, backend, keys):
    """`fullgraph` fails where a segment boundary would end a graph."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    steps = 1 if backend == "inductor" else 3
    assert len({tuple(batch(n).seq_lens) for n in range(3)}) == 3
    numbers, _ = train(tiny, module_world, steps=steps, compile=CompileConfig(fullgraph=True), **keys)
    wanted = plain["adamw"][0]
    assert numbers[: len(wanted)] == pytest.approx(wanted[: len(numbers)], abs=1e-5, rel=1e-4)
    assert counters["stats"]["unique_graphs"] <= 3
