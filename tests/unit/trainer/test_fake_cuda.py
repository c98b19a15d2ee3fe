"""Whole training steps on a simulated CUDA device: devices, dtypes and shapes of every operation.

docs/design/memory.md states that the host reads nothing from the device within a row; each test compares all reads with
those that are allowed once per step.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import Qwen3Config, Qwen3MoeConfig

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.model import ActivationCheckpointConfig, ActivationOffloadConfig
from prime_rl.configs.training.optim import AdamWConfig, MuonConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer import memory_savings
from prime_rl.trainer.memory_savings import ActivationOffload, offload_state, prepare_optimizer
from prime_rl.trainer.micro_batch import make_micro_batch, masked_row
from prime_rl.trainer.model import lm_head
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.device_mesh import Layout
from prime_rl.trainer.parallel.process_group import RankConsensus, World
from prime_rl.trainer.rl.batch_source import fake_batch, fake_routes, split_batch
from prime_rl.trainer.rl.rl_objective import References, build_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weight_sync import gather_plan, publisher
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.fake_cuda import DEVICE, fake_cuda, without_fakes
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_parallel import make_variant
from tests.unit.trainer.test_policy_model import ARCHITECTURES, save
from tests.unit.trainer.test_rope import config as rope_config

# The sums of loss and gradient, once per minibatch, and the means, once per step.
ALLOWED = {"train_step.py:_sum_loss", "train_step.py:gradient_norm", "train_step.py:reduce"}
OFFLOAD = {"ac_offloading": ActivationOffloadConfig(max_inflight_activations=2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "dense")
    make_variant(root / "untied", Qwen3Config)
    make_variant(root / "experts", Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    for path, make in (("sinks", ARCHITECTURES["gpt_oss_sinks_window"]), ("longrope", lambda: rope_config("longrope"))):
        make_tiny_model(root / path)  # for the tokenizer
        settings = make()
        settings.vocab_size = 128
        save(settings, root / path)
    return root


@pytest.fixture(autouse=True)
def nothing_is_compiled_and_everything_is_large_enough(monkeypatch):
    monkeypatch.setattr(lm_head, "_compile", lambda function: function)
    monkeypatch.setattr(memory_savings.ActivationOffload.__init__, "__defaults__", (0,))


def make_batch(streams=()):
    config = FakeDataConfig(batch_size=4, seq_len=30, micro_batch_size=2, variable_length=True)
    batch = fake_batch(config, 103, row_length=60, seed=0, step=0)
    arrays = {name: np.full(len(batch.tokens), value, np.float32) for name, value in dict(streams).items()}
    return replace(batch, **arrays)


def trace(model, ranks=1, minibatches=1, loss=None, optim=None, blank=False, streams=(), **keys):
    """Run one step; return which functions read from the device during it."""
    config = TrainerConfig(
        model={"name": str(model), "seq_len": 60, "debug": {"num_layers": 1}, **keys},
        loss=loss or {"type": "aipo"},
        optim=optim or AdamWConfig(),
    )
    batch = make_batch(streams)
    with fake_cuda(ranks) as device:
        world = World(0, ranks, DEVICE, model_parallel_size=Layout.of(config.model, ranks).model_parallel_size)
        policy = make_policy(config.model, 0, world)
        policy.entropy_gradient = config.loss.entropy_coef > 0
        if policy.replay is not None:
            batch = replace(batch, routed_experts=fake_routes(batch.seq_lens, policy.replay, 0, 0))
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        engine = TrainStep(policy, optimizer, world, max_norm=1.0)
        references = References(config, policy, world)
        parts = split_batch(batch, 0, minibatches, world, max_tokens=60)
        if blank:
            parts = [replace(part, rows=[*part.rows, masked_row()]) for part in parts]
        device.reads.clear()
        result = engine.step(references.score(parts), build_objective(config.loss, 60), 1.0)
        assert result.skipped == 0
        assert not {*device.nondeterministic} - {"lm_head.py:_lowest_kept_logit"}
        assert all(parameter.device == DEVICE for parameter in policy.parameters())
    return set(device.reads)


KL = {"type": "aipo", "kl": {"coef": 0.1}}  # needs a reference model
MASK_READS = {f"lm_head.py:{name}" for name in ("kept_threshold", "_find_threshold", "_lowest_kept_logit")}
BALANCE_READS = {"routing.py:reduce"}
# name -> (model, keys, reads besides those that are always allowed)
STEPS = {
    "reference model and minibatches": ("dense", {"minibatches": 2, "loss": KL}, set()),
    "sampling mask": ("dense", {"streams": {"top_p": 0.9, "min_p": 0.1}}, MASK_READS),
    "gspo": ("dense", {"loss": {"type": "gspo"}}, set()),
    "icepop with teacher": ("dense", {"loss": {"type": "icepop", "teacher_tau": 0.5}}, set()),
    "decoupled_ppo with minibatches": ("dense", {"minibatches": 2, "loss": {"type": "decoupled_ppo"}}, set()),
    "adapters and their base as reference": ("dense", {"lora": {"rank": 4}, "loss": KL}, set()),
    "muon": ("dense", {"ranks": 2, "optim": MuonConfig()}, set()),
    "two ranks, and a row without trained tokens": ("untied", {"ranks": 2, "minibatches": 2, "blank": True}, set()),
    "context parallelism": ("dense", {"ranks": 2, "cp": {"degree": 2}}, set()),
    "longrope": ("longrope", {}, set()),
    "attention sinks": ("sinks", {"debug": {}}, BALANCE_READS),
    "experts": ("experts", {"ranks": 2}, BALANCE_READS),
    "router replay and recomputation": ("experts", {"router_replay": True, "ac": {"mode": "full"}}, BALANCE_READS),
    "adapters of experts": ("experts", {"lora": {"rank": 8, "target_modules": ["experts"]}}, BALANCE_READS),
    "entropy bonus": ("dense", {"loss": {"type": "aipo", "entropy_coef": 0.01}}, set()),
}


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("case", STEPS)
def test_step_reads_nothing_inside_a_row(models, case):
    model, keys, reads = STEPS[case]
    assert trace(models / model, **keys) == ALLOWED | reads


@pytest.mark.extended
@pytest.mark.parametrize("ac", [None, ActivationCheckpointConfig(mode="selective")])
def test_step_with_offloads_runs(models, ac, monkeypatch):
    locked = []
    monkeypatch.setattr(memory_savings, "lock_pages", lambda buffer: locked.append(buffer))
    assert trace(models / "dense", minibatches=2, ac=ac, optim_cpu_offload=True, **OFFLOAD) == ALLOWED
    assert locked and all(buffer.device.type == "cpu" and not buffer.is_pinned() for buffer in locked)


@pytest.mark.parametrize(("name", "own"), [("dense", False), ("untied", True)])
def test_untied_embedding_and_head_are_fsdp_units(models, name, own):
    config = TrainerConfig(model={"name": str(models / name)})
    with fake_cuda(2):
        causal_lm = make_policy(config.model, 0, World(0, 2, DEVICE)).causal_lm
        for module in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()):
            assert isinstance(module, FSDPModule) == own


def test_forward_with_expert_parallelism_reads_once_per_layer_and_prefetches_blocks(models):
    """60 tokens choose two experts each; each of two layers reads twice two numbers."""
    config = TrainerConfig(model={"name": str(models / "experts"), "ep": 2})
    row = make_micro_batch(np.arange(60), np.arange(60) > 0, [60])
    with fake_cuda(2) as device, torch.no_grad():
        policy = make_policy(config.model, 0, World(0, 2, DEVICE))
        device.integer = 60
        device.reads.clear()
        logprobs, _ = policy(row.to(DEVICE))
        assert logprobs.device == DEVICE
        one, two = (block._get_fsdp_state() for block in policy.blocks)
    assert device.reads == ["fsdp.py:forward"] * 4 * 2
    assert len(one._states_to_forward_prefetch) == 2, "a block and its experts"
    assert len(two._states_to_backward_prefetch) == 2


def test_offloaded_state_is_on_the_device_for_three_parts_at_most(monkeypatch):
    monkeypatch.setattr(memory_savings, "lock_pages", lambda _: None)
    parameter_bytes, parts = 4096, 12
    with fake_cuda() as device:
        parameters = [torch.nn.Parameter(torch.ones(parameter_bytes // 4, device=DEVICE)) for _ in range(parts)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        offload_state(optimizer, part_bytes=parameter_bytes)
        device.watch_memory()
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert device.early == 0, "memory was given back while it was copied"
    assert 2 * parameter_bytes < device.most_bytes <= 3 * 2 * parameter_bytes


def test_offloaded_activations_use_device_memory_for_inflight_copies_only():
    size, inflight = 64 * 64 * 4, 3
    with fake_cuda() as device:
        blocks = [torch.nn.Linear(64, 64, bias=False, device=DEVICE) for _ in range(12)]
        offload = ActivationOffload(pin_memory=True, inflight=inflight, min_bytes=0)
        states = torch.ones(64, 64, device=DEVICE, requires_grad=True) * 1
        device.watch_memory()
        for block in blocks:
            states = offload.wrap(block, block.forward)(states.sin())
        states.sum().backward()
        states = None
        torch.ones(1, device=DEVICE) + 1  # tracks the memory once more
    assert device.early == 0, "memory was given back while it was copied"
    assert size < device.most_bytes <= (inflight + 2) * size


class LoneAgreement(RankConsensus):
    """Consensus of one rank without a process group; the fake one does not transfer objects."""

    def gather(self, work):
        return [work()]


def test_publication_reads_nothing_from_the_device_in_the_training_thread(models, monkeypatch):
    """A read of the writer thread would wait for all training that is queued on the device."""
    fields, stepped = [], threading.Event()

    def write(self, job, buffer):
        assert stepped.wait(60)  # the fake device is not safe for two threads at once
        with device:
            fields.append(self._canary_fields(job))

    monkeypatch.setattr(publisher, "RankConsensus", LoneAgreement)
    monkeypatch.setattr(publisher.Publisher, "_write", write)
    monkeypatch.setattr(World, "new_group", lambda _: None)
    monkeypatch.setattr(gather_plan, "lock_pages", lambda _: None)
    name = "compute_local_shape_and_global_offset"
    monkeypatch.setattr(gather_plan, name, without_fakes(getattr(gather_plan, name)))
    config = TrainerConfig(model={"name": str(models / "dense")})
    tokenizer = load_tokenizer(TokenizerConfig(), config.model)
    with fake_cuda() as device:
        world = World(0, 1, DEVICE)
        policy = make_policy(config.model, 0, world)
        publication = publisher.Publisher(policy, tokenizer, torch.bfloat16, world, canary=torch.bfloat16)
        optimizer = build_optimizer(config.optim, policy)
        publication.guard(optimizer)
        device.reads.clear()
        publication.start(models / "step_1", PolicyVersion(0, 1))
        optimizer.step()
        stepped.set()
        publication.wait()
    assert device.reads == []
    assert [len(fields[0]["canary"][name]) for name in ("token_ids", "logprobs")] == [64, 63]
