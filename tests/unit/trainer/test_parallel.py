"""Loss, gradients and published weights do not depend on the layout of the ranks (I9; gloo, float32)."""

import dataclasses
import os
import re
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4TextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer.micro_batch import PADDING_ROW, assign_rows, make_micro_batch, masked_row
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.device_mesh import Layout, check_context_parallel
from prime_rl.trainer.parallel.process_group import World, wrap_rank_errors
from prime_rl.trainer.train_step import Counts, Minibatch, Objective, TrainStep
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.unit.trainer.world import run_world

# name -> (ranks, models, model keys)
LAYOUTS = {
    "shard": (2, ("dense", "experts", "hybrid"), {}),
    "replicate": (2, ("dense",), {"dp_replicate": 2}),
    "cp": (2, ("dense", "sliding"), {"cp": {"degree": 2}}),
    "tp": (2, ("dense", "experts"), {"tp": 2}),
    "ep": (2, ("experts",), {"ep": 2}),
}
# Combinations of what the layouts above cover, on more ranks.
EXTENDED_LAYOUTS = {
    "reshard_pairs": (4, ("dense", "few"), {"reshard_ranks": 2}),
    "replicate_cp": (4, ("dense",), {"dp_replicate": 2, "cp": {"degree": 2}, "fsdp_cpu_offload": True}),
    "tp_cp": (4, ("dense",), {"tp": 2, "cp": {"degree": 2}, "ac": {"freq": 1}}),
    "ep_cp": (4, ("experts",), {"ep": 4, "cp": {"degree": 2}, "ac": {"freq": 1}}),
    "columns_of_experts": (3, ("experts",), {}),  # the rows of one matrix, and the columns of the other
    "inside_experts": (4, ("few",), {}),  # more ranks than experts
    "ep_inside_experts": (4, ("few",), {"ep": 2}),  # one expert for two ranks
    "cp_all": (4, ("dense", "sliding"), {"cp": {"degree": 4}}),  # more ranks than key-value heads
    "tp_shard": (4, ("dense",), {"tp": 2}),
    "ep_tp": (4, ("experts",), {"ep": 2, "tp": 2}),
    "ep_replicate": (4, ("experts",), {"ep": 2, "dp_replicate": 2}),
}
MODELS = ("dense", "sliding", "experts", "few", "hybrid")


def layout_cases(layouts):
    """Return model-layout -> (ranks, model, model keys)."""
    return {
        f"{model}-{name}": (ranks, model, keys) for name, (ranks, models, keys) in layouts.items() for model in models
    }


CASES = layout_cases(LAYOUTS) | layout_cases(EXTENDED_LAYOUTS)
CASE_PARAMETERS = [*layout_cases(LAYOUTS)]
CASE_PARAMETERS += [pytest.param(name, marks=pytest.mark.extended) for name in layout_cases(EXTENDED_LAYOUTS)]
STEPS = 3
LENGTHS = [(23, 9, 2), (31,), (5, 4, 3, 17), (2,), (11, 13)]  # rows of odd lengths, one with two tokens only


def make_rows(step):
    random = np.random.default_rng(step)
    rows = []
    for lengths in LENGTHS:
        total = sum(lengths)
        mask = np.concatenate([np.arange(n) >= max(1, n // 2) for n in lengths])
        rows.append(
            make_micro_batch(
                random.integers(0, VOCAB_SIZE, total),
                mask,
                lengths,
                logprobs=random.normal(-4.8, 0.3, total),
                advantages=np.repeat(random.standard_normal(len(lengths)), lengths),
                temperature=np.repeat(random.uniform(0.5, 1.5, len(lengths)), lengths),
            )
        )
    return rows


def add_nan(rows):
    """Make the gradient of one row not finite."""
    rows[0].advantages[int(rows[0].scored[3])] = np.nan


def minibatch_of(rows, world):
    assigned = assign_rows([float(len(row.tokens)) for row in rows], world.data_size)[world.data_rank]
    tokens = int(sum(row.loss_mask.sum() for row in rows))
    return Minibatch([masked_row() if i == PADDING_ROW else rows[i] for i in assigned], Counts(tokens))


def sequence_objective(scored):
    """A sequence-level loss, which is not a sum over tokens."""
    row = scored.row
    zeros = torch.zeros(int(row.segment_ids[-1]) + 1)
    count = zeros.index_add(0, row.segment_ids, row.loss_mask.float()).clamp(min=1)
    difference = torch.where(row.loss_mask, scored.logprobs - row.sampler_logprobs, 0.0)
    ratio = (zeros.index_add(0, row.segment_ids, difference) / count).clamp(-2, 2).exp()
    loss = -torch.where(row.loss_mask, ratio[row.segment_ids] * row.advantages, 0.0).sum()
    means = {"entropy": (scored.entropy.sum(), row.loss_mask.sum())}
    return Objective(loss / scored.counts.tokens, means)


def run_layouts(world, argument):
    """Train three steps in every layout; runs on every rank."""
    root, results = Path(argument["root"]), {}
    for name, (source, keys) in argument["layouts"].items():
        config = TrainerModelConfig(name=str(root / source), **keys)
        world = dataclasses.replace(world, model_parallel_size=Layout.of(config, world.size).model_parallel_size)
        policy = make_policy(config, 0, world)
        check_packing(policy, config, world, config.seq_len)
        optimizer = build_optimizer(AdamWConfig(lr=1e-3), policy)
        gradients = record_gradients(optimizer, policy)
        engine = TrainStep(policy, optimizer, world, max_norm=1.0)
        batches = [make_rows(n) for n in range(STEPS)]
        add_nan(batches[-1])
        minibatches = [[minibatch_of(rows, world)] for rows in batches]
        steps = [engine.step(minibatch, sequence_objective, 1.0, layer_norms=True) for minibatch in minibatches]
        results[name] = [dataclasses.asdict(step) for step in steps]
        if world.is_main:
            save_file(gradients, root / f"gradients_{name}.safetensors")
        tokenizer = load_tokenizer(TokenizerConfig(), config)
        Publisher(policy, tokenizer, torch.float32, world).publish(root / f"out_{name}", PolicyVersion(0, 3))
    return results


def record_gradients(optimizer, policy):
    """Return a dict that the first step fills with its whole gradients."""
    kept = {}

    def record(*_):
        if not kept:
            kept.update((name, p.grad.full_tensor().clone()) for name, p in policy.causal_lm.named_parameters())

    optimizer.register_step_pre_hook(record)
    return kept


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, request):
    """Train in the layouts of the selected tests; return the models' directory and the steps of each case."""
    root = tmp_path_factory.mktemp("layouts")
    make_models(root)
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = {item.callspec.params.get("case") for item in mine}
    results = {}
    for size in (1, 2, 3, 4):
        chosen = {f"{source}-alone": (source, {}) for source in MODELS} if size == 1 else {}
        for name, (ranks, model, keys) in CASES.items():
            if ranks == size and name in selected:
                chosen[name] = (model, keys)
        if chosen:
            answers = run_world(size, run_layouts, {"root": str(root), "layouts": chosen}, root)
            assert all(answer == answers[0] for answer in answers), "the ranks disagree"
            results |= answers[0]
    return root, results


def make_models(root):
    make_tiny_model(root / "dense")
    make_variant(root / "sliding", Qwen3Config, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    config = AutoConfig.from_pretrained(root / "sliding")
    assert config.layer_types == ["full_attention", "sliding_attention"] and config.sliding_window == 5
    make_variant(root / "experts", Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    delta = {f"linear_{key}": 4 for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    make_variant(root / "hybrid", Qwen3_5TextConfig, layer_types=["linear_attention", "full_attention"], **delta)
    make_variant(root / "few", Qwen3MoeConfig, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=48)


def make_variant(path, kind, **changes):
    """Write a tiny untied model of another kind, with the tokenizer of `make_tiny_model`."""
    make_tiny_model(path)
    keys = AutoConfig.from_pretrained(path).to_dict()
    for key in ("model_type", "architectures", "layer_types"):
        keys.pop(key)
    config = kind(**{**keys, "tie_word_embeddings": False, **changes})
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASE_PARAMETERS)
def test_layout_gives_the_gradients_and_weights_of_one_rank(worlds, case):
    """Loss, norm, gradients and published weights do not depend on the layout (I9)."""
    root, results = worlds
    alone = f"{case.split('-')[0]}-alone"
    assert len(results[case]) == STEPS
    for wanted, got in zip(results[alone][:-1], results[case][:-1], strict=True):
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-5)
        assert got["means"] == pytest.approx(wanted["means"], rel=1e-5)
        assert got["layer_norms"] == pytest.approx(wanted["layer_norms"], rel=1e-4, abs=1e-5)
        assert got["skipped"] == 0
    # A gradient that is not finite on one rank is skipped on all ranks and does not change the weights (I10).
    assert (results[case][-1]["skipped"], results[case][-1]["grad_norm"]) == (1, None)
    wanted, got = (load_file(root / f"gradients_{name}.safetensors") for name in (alone, case))
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    wanted, got = (load_file(root / f"out_{name}" / "model.safetensors") for name in (alone, case))
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("size", "keys", "message"),
    [
        (4, {"dp_replicate": 3}, "model.dp_replicate 3 does not divide the 4 ranks"),
        (6, {"tp": 2, "cp": {"degree": 2}}, "model.cp 2 x model.tp 2 = 4 does not divide the 6 ranks"),
        (4, {"ep": 3}, "model.ep 3 must be a multiple of model.cp 1 and divide the 4 ranks"),
        (4, {"ep": 2, "cp": {"degree": 4}}, "model.ep 2 must be a multiple of model.cp 4"),
        (4, {"dp_replicate": 2, "reshard_ranks": 4}, "model.reshard_ranks 4 does not divide the 2 ranks"),
    ],
)
def test_layout_that_does_not_divide_the_ranks_is_refused(size, keys, message):
    with pytest.raises(ConfigError, match=message):
        Layout.of(TrainerModelConfig(**keys), size)


def test_ranks_of_one_model_parallel_group_have_the_same_data_rank():
    ranks = [World(rank, 8, torch.device("cpu"), model_parallel_size=4) for rank in range(8)]
    assert [(w.data_rank, w.data_size) for w in ranks] == [(0, 2)] * 4 + [(1, 2)] * 4


def test_context_parallelism_checks_the_heads_of_each_layer():
    text = Gemma4TextConfig(num_attention_heads=4, num_global_key_value_heads=1, attention_k_eq_v=True)
    check_context_parallel(text, TrainerModelConfig(), 2)
    with pytest.raises(ConfigError, match="4 heads and 4 key-value heads, which 3 ranks"):
        check_context_parallel(text, TrainerModelConfig(), 3)


REFUSED = {
    "model.cp 3: .* 4 heads and 2 key-value heads, which 3 ranks": ("dense", {"cp": {"degree": 3}}),
    "model.tp 3 does not divide the num_attention_heads": ("dense", {"tp": 3}),
    "model.ep: transformers has no plan": ("dense", {"ep": 3}),
    "model.ep 3: .*experts.* has 4": ("experts", {"ep": 3}),
    "model.reshard_ranks 2 does not divide the 3 ranks": ("dense", {"reshard_ranks": 2}),
}


def refuse(world, argument):
    messages = []
    for model, keys in argument:
        config = TrainerModelConfig(name=model, **keys)
        with pytest.raises(ConfigError) as caught:
            layout = Layout.of(config, world.size)
            make_policy(config, 0, dataclasses.replace(world, model_parallel_size=layout.model_parallel_size))
        messages.append(str(caught.value))
    return messages


@pytest.mark.extended
def test_layout_that_does_not_fit_the_model_is_refused(worlds):
    cases = [(str(worlds[0] / model), keys) for model, keys in REFUSED.values()]
    for messages in run_world(3, refuse, cases, worlds[0]):
        for pattern, message in zip(REFUSED, messages, strict=True):
            assert re.search(pattern, message) and "\n" not in message


def count_reductions(world, path):
    """Count the reductions of a step with one row and of one with five rows; runs on every rank."""
    calls, answers = [], []

    def counting(original, *args, **keys):
        calls.append(original)
        return original(*args, **keys)

    for name in {"reduce_scatter_tensor", "reduce_scatter_single"} & {*dir(dist)}:  # of torch 2.11 and 2.13
        setattr(dist, name, partial(counting, getattr(dist, name)))
    for once in (False, True):
        policy = make_policy(TrainerModelConfig(name=path), 0, world)
        engine, steps = TrainStep(policy, build_optimizer(AdamWConfig(), policy), world, None, reduce_once=once), []
        for num_rows in (1, 5):
            calls.clear()
            step = engine.step([Minibatch(make_rows(0)[:num_rows], Counts(10))], sequence_objective, 1.0)
            steps.append([step.loss, step.grad_norm, len(calls)])
        answers.append(steps)
    return answers


@pytest.mark.extended
def test_gradients_are_reduced_for_every_row_or_once_with_equal_norms(tmp_path):
    """By default for every row, so that they stay sharded; with `reduce_once` in the last row only."""
    path = str(make_tiny_model(tmp_path / "dense"))
    for every, once in run_world(2, count_reductions, path, tmp_path):
        assert [[step[2] for step in steps] for steps in (every, once)] == [[3, 15], [3, 3]], "two blocks and the root"
        for got, wanted in zip(every, once, strict=True):
            assert got[:2] == pytest.approx(wanted[:2], rel=1e-6)


def lose_a_rank(world, argument):
    """Runs on two ranks: the second ends, or stops answering, between two steps."""
    path, how = argument
    world = dataclasses.replace(world, model_parallel_size=2, timeout_seconds=10.0)
    dist.barrier()  # with the limit of `join_world`: no rank waits below until another is ready
    policy = make_policy(TrainerModelConfig(name=path, cp={"degree": 2}), 0, world)
    engine = TrainStep(policy, build_optimizer(AdamWConfig(), policy), world, max_norm=None)
    dist.barrier()
    engine.step([minibatch_of(make_rows(0), world)], sequence_objective, 1.0)
    if world.rank == 1:
        os._exit(1) if how == "dies" else signal.pause()
    begin = time.monotonic()
    try:
        with wrap_rank_errors(world.timeout_seconds):
            engine.step([minibatch_of(make_rows(1), world)], sequence_objective, 1.0)
    except RunError as error:
        return [str(error), time.monotonic() - begin]


@pytest.mark.extended
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_collective_with_a_lost_rank_raises_on_the_others(worlds, how):
    """The other ranks raise at once if connections close, else after the world's time limit (I7)."""
    ((message, seconds),) = run_world(2, lose_a_rank, (str(worlds[0] / "dense"), how), worlds[0], lost=(1,))
    assert "rank 0 lost another rank" in message and "\n" not in message
    assert seconds < 90, "not the limit of `join_world`"


def test_rendezvous_on_a_port_in_use_raises_config_error(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(MASTER_PORT\): another process listens"),
            wrap_rank_errors(5, joining=True),
        ):
            dist.TCPStore("127.0.0.1", port, 1, is_master=True)


@pytest.mark.extended
def test_rendezvous_without_rank_zero_times_out(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with (
        pytest.raises(RunError, match=rf"did not join the 1 ranks at .*:{port} within 1 s"),
        wrap_rank_errors(1, joining=True),
    ):
        dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))
