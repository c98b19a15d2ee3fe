"""I9: however the ranks divide the work, loss, gradients and published weights are those of one rank (gloo, fp32)."""

import dataclasses
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from prime_rl.configs.optim import AdamWConfig
from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run.assign import PADDING_ROW, assign_rows
from prime_rl.trainer.engine import Counts, Engine, Minibatch, Objective
from prime_rl.trainer.layout import Layout
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.micro_batch import make_micro_batch, masked_row
from prime_rl.trainer.model import load_tokenizer
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.parallel import World, lost_ranks_told, meeting_told
from prime_rl.trainer.publication import Publisher
from prime_rl.types import PolicyVersion
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.unit.trainer.world import run_world

# name -> (ranks, models, model keys)
LAYOUTS = {
    "shard": (2, ("dense", "experts"), {}),
    "replicate": (2, ("dense",), {"dp_replicate": 2}),
    "cp": (2, ("dense", "sliding"), {"cp": {"degree": 2}}),
    "tp": (2, ("dense", "experts"), {"tp": 2}),
    "ep": (2, ("experts",), {"ep": 2}),
    "replicate_shard": (4, ("dense",), {"dp_replicate": 2}),
    "reshard_pairs": (4, ("dense",), {"reshard_ranks": 2}),
    "replicate_cp": (4, ("dense",), {"dp_replicate": 2, "cp": {"degree": 2}, "fsdp_cpu_offload": True}),
    "cp_shard": (4, ("dense",), {"cp": {"degree": 2}}),
    "cp_all": (4, ("dense", "sliding"), {"cp": {"degree": 4}}),  # more ranks than key-value heads
    "tp_shard": (4, ("dense",), {"tp": 2}),
    "tp_cp": (4, ("dense",), {"tp": 2, "cp": {"degree": 2}, "ac": {"freq": 1}}),
    "ep_shard": (4, ("experts",), {"ep": 2}),
    "ep_cp": (4, ("experts",), {"ep": 4, "cp": {"degree": 2}, "ac": {"freq": 1}}),
    "ep_tp": (4, ("experts",), {"ep": 2, "tp": 2}),
    "ep_replicate": (4, ("experts",), {"ep": 2, "dp_replicate": 2}),
}
MODELS = ("dense", "sliding", "experts")
CASES = [f"{model}-{name}" for name, (_, models, _) in LAYOUTS.items() for model in models]
STEPS = 3
LENGTHS = [(23, 9, 2), (31,), (5, 4, 3, 17), (2,), (11, 13)]  # rows of odd lengths, one with nothing but two tokens


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


def poison(rows):
    """One rank's gradient of one row is not finite."""
    rows[0].advantages[int(rows[0].scored[3])] = np.nan


def share(rows, world):
    dealt = assign_rows([float(len(row.tokens)) for row in rows], world.data_size)[world.data_rank]
    tokens = int(sum(row.loss_mask.sum() for row in rows))
    return Minibatch([masked_row() if i == PADDING_ROW else rows[i] for i in dealt], Counts(tokens))


def sequence_objective(scored):
    """A loss that is not a sum over tokens: it must see whole sequences."""
    row = scored.row
    zeros = torch.zeros(int(row.segment_ids[-1]) + 1)
    count = zeros.index_add(0, row.segment_ids, row.loss_mask.float()).clamp(min=1)
    difference = torch.where(row.loss_mask, scored.logprobs - row.sampler_logprobs, 0.0)
    ratio = (zeros.index_add(0, row.segment_ids, difference) / count).clamp(-2, 2).exp()
    loss = -torch.where(row.loss_mask, ratio[row.segment_ids] * row.advantages, 0.0).sum()
    means = {"entropy": (scored.entropy.sum(), row.loss_mask.sum())}
    return Objective(loss / scored.counts.tokens, means)


def run_layouts(world, argument):
    """Runs on every rank: three steps under every layout of so many ranks."""
    root, results = Path(argument["root"]), {}
    for name, (source, keys) in argument["layouts"].items():
        config = TrainerModelConfig(name=str(root / source), **keys)
        world = dataclasses.replace(world, sharers=Layout.of(config, world.size).sharers)
        policy = make_policy(config, 0, world)
        optimizer = build_optimizer(AdamWConfig(lr=1e-3), policy)
        gradients = record_gradients(optimizer, policy)
        engine = Engine(policy, optimizer, world, max_norm=1.0)
        batches = [make_rows(n) for n in range(STEPS)]
        poison(batches[-1])
        steps = [engine.step([share(rows, world)], sequence_objective, 1.0) for rows in batches]
        results[name] = [dataclasses.asdict(step) for step in steps]
        if world.leads:
            save_file(gradients, root / f"gradients_{name}.safetensors")
        tokenizer = load_tokenizer(_no_tokenizer(), config)
        Publisher(policy, tokenizer, torch.float32, world).publish(root / f"out_{name}", PolicyVersion(0, 3))
    return results


def record_gradients(optimizer, policy):
    """Return what the first step fills with its gradients, whole."""
    kept = {}

    def record(*_):
        if not kept:
            kept.update((name, p.grad.full_tensor().clone()) for name, p in policy.causal_lm.named_parameters())

    optimizer.register_step_pre_hook(record)
    return kept


def _no_tokenizer():
    from prime_rl.configs.shared import TokenizerConfig

    return TokenizerConfig()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    make_models(root)
    results = {}
    for size in (1, 2, 4):
        chosen = {f"{source}-alone": (source, {}) for source in MODELS} if size == 1 else {}
        for name, (ranks, models, keys) in LAYOUTS.items():
            if ranks == size:
                chosen |= {f"{model}-{name}": (model, keys) for model in models}
        answers = run_world(size, run_layouts, {"root": str(root), "layouts": chosen}, root)
        assert all(answer == answers[0] for answer in answers), "the ranks disagree"
        results |= answers[0]
    return root, results


def make_models(root):
    make_tiny_model(root / "dense")
    make_variant(root / "sliding", Qwen3Config, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    make_variant(root / "experts", Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)


def make_variant(path, kind, **changes):
    """A tiny model of another kind, untied, beside the tokenizer of the first."""
    make_tiny_model(path)
    keys = AutoConfig.from_pretrained(path).to_dict()
    for key in ("model_type", "architectures", "layer_types"):
        keys.pop(key)
    config = kind(**{**keys, "tie_word_embeddings": False, **changes})
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


@pytest.mark.parametrize("case", CASES)
def test_layout_is_invisible(worlds, case):
    """I9: loss, gradient norm and every gradient of the first step, loss and norm of three, and what is published."""
    root, results = worlds
    alone = f"{case.split('-')[0]}-alone"
    assert len(results[case]) == STEPS
    for wanted, got in zip(results[alone][:-1], results[case][:-1], strict=True):
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-5)
        assert got["means"] == pytest.approx(wanted["means"], rel=1e-5)
        assert got["skipped"] == 0
    # I10: what is not finite on one rank is skipped on all, and what is published is as if it had not been.
    assert (results[case][-1]["skipped"], results[case][-1]["grad_norm"]) == (1, None)
    wanted, got = (load_file(root / f"gradients_{name}.safetensors") for name in (alone, case))
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    wanted, got = (load_file(root / f"out_{name}" / "model.safetensors") for name in (alone, case))
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-4)


def test_the_sliding_model_slides(worlds):
    config = AutoConfig.from_pretrained(worlds[0] / "sliding")
    assert config.layer_types == ["full_attention", "sliding_attention"] and config.sliding_window == 5


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
def test_sizes_are_checked(size, keys, message):
    with pytest.raises(ConfigError, match=message):
        Layout.of(TrainerModelConfig(**keys), size)


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"cp": {}, "attn": "sdpa"}, "model.attn='varlen'"), ({"lora": {}, "tp": 2}, "set model.tp=1")],
)
def test_combinations_are_refused_at_once(keys, message):
    with pytest.raises(ValueError, match=message):
        TrainerModelConfig(**keys)


def test_ranks_that_share_rows_are_dealt_the_same():
    ranks = [World(rank, 8, torch.device("cpu"), sharers=4) for rank in range(8)]
    assert [(w.data_rank, w.data_size) for w in ranks] == [(0, 2)] * 4 + [(1, 2)] * 4


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
            make_policy(config, 0, dataclasses.replace(world, sharers=Layout.of(config, world.size).sharers))
        messages.append(str(caught.value))
    return messages


def test_what_the_model_cannot_is_refused(worlds):
    cases = [(str(worlds[0] / model), keys) for model, keys in REFUSED.values()]
    for messages in run_world(3, refuse, cases, worlds[0]):
        for pattern, message in zip(REFUSED, messages, strict=True):
            assert re.search(pattern, message) and "\n" not in message


def count_collectives(world, path):
    """Runs on every rank: how often a step with one row, and one with five, sums gradients."""
    counts = {}
    for name, keys in {"shard": {}, "replicate": {"dp_replicate": 2}}.items():
        policy = make_policy(TrainerModelConfig(name=path, **keys), 0, world)
        engine = Engine(policy, build_optimizer(AdamWConfig(), policy), world, max_norm=None)
        rows = make_rows(0)
        minibatches = [Minibatch(part, Counts(10)) for part in (rows[:1], rows)]
        engine.step(minibatches, sequence_objective, 1.0)  # the first pass of a fresh policy may do more
        counts[name] = [collectives_in(lambda m=m, e=engine: e.step([m], sequence_objective, 1.0)) for m in minibatches]
    return counts


def collectives_in(action):
    """Count what `action` calls; torch 2.13 has other names for it than 2.11."""
    names = (
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
    )
    counts = dict.fromkeys(("reduce_scatter", "all_reduce", "all_gather"), 0)
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in names if hasattr(torch.distributed, name)):
            kind, original = "_".join(name.split("_")[:2]), getattr(torch.distributed, name)

            def counting(*args, kind=kind, original=original, **kwargs):
                counts[kind] += 1
                return original(*args, **kwargs)

            patch.setattr(torch.distributed, name, counting)
        action()
    return counts


def test_accumulation_sums_once(worlds):
    """Gradients of five rows travel as often as those of one, however the model is sharded."""
    for counts in run_world(2, count_collectives, str(worlds[0] / "dense"), worlds[0]):
        sharded, replicated = counts["shard"], counts["replicate"]
        assert sharded[0]["reduce_scatter"] == sharded[1]["reduce_scatter"] == 3, "two blocks and the root"
        assert sharded[0]["all_gather"] < sharded[1]["all_gather"]
        assert replicated[0]["all_reduce"] == replicated[1]["all_reduce"] > 3


def lose_a_rank(world, argument):
    """Runs on two ranks: the second ends, or stops answering, between two steps."""
    path, how = argument
    world = dataclasses.replace(world, sharers=2, timeout_s=2.0)
    policy = make_policy(TrainerModelConfig(name=path, cp={"degree": 2}), 0, world)
    engine = Engine(policy, build_optimizer(AdamWConfig(), policy), world, max_norm=None)
    engine.step([share(make_rows(0), world)], sequence_objective, 1.0)
    if world.rank == 1:
        os._exit(1) if how == "dies" else signal.pause()
    begin = time.monotonic()
    try:
        with lost_ranks_told(world.timeout_s):
            engine.step([share(make_rows(1), world)], sequence_objective, 1.0)
    except RunError as error:
        return [str(error), time.monotonic() - begin]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_ends_the_others(worlds, how):
    """I7: at once where its connections close, else after the world's time limit, which holds in every group."""
    ((message, seconds),) = run_world(2, lose_a_rank, (str(worlds[0] / "dense"), how), worlds[0], lost=(1,))
    assert "rank 0 lost another rank" in message and "\n" not in message
    assert seconds < 20


def test_a_port_that_somebody_has_is_named_and_not_told_as_a_lost_rank(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(MASTER_PORT\): somebody listens"),
            meeting_told(5),
        ):
            dist.TCPStore("127.0.0.1", port, 1, is_master=True)


def test_a_rank_zero_that_is_not_there_is_waited_for_with_a_deadline(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RunError, match=rf"has not met the 1 ranks at .*:{port} within 1 s"), meeting_told(1):
        dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))
