"""Replayed experts are the recorded ones, with the weights and gradients of the trained router (R3)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.model import ActivationCheckpointConfig, TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.fsdp import Layout
from prime_rl.trainer.memory_savings import prepare_blocks
from prime_rl.trainer.micro_batch import PADDING_ROW, assign_rows, make_micro_batch, masked_row
from prime_rl.trainer.model import varlen_attention
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.process_group import NodeRanks
from prime_rl.trainer.rl.batch_source import fake_batch, fake_routes, make_row
from prime_rl.trainer.rl.rl_objective import References
from prime_rl.trainer.train_step import Counts, Minibatch, TrainStep
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.unit.trainer.test_parallel import sequence_objective
from tests.unit.trainer.world import run_world

EXPERTS, CHOSEN, LAYERS = 8, 3, 3
LENGTHS = [9, 2, 17, 1, 12]
TOKENS, LAST = sum(LENGTHS), np.cumsum(LENGTHS) - 1
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}


def softmax(z):
    return np.exp(z - z.max(-1, keepdims=True)) / np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)


def take(values, ids):
    return np.take_along_axis(values, ids, -1)


def shares(values):
    return values / values.sum(-1, keepdims=True)


def all_scores(z, ids, _):
    return take(softmax(z), ids)


def normalized(z, ids, _):
    return shares(take(softmax(z), ids))


def of_chosen(z, ids, _):
    return softmax(take(z, ids))


def sigmoids(z, ids, config):
    return shares(take(1 / (1 + np.exp(-z)), ids)) * getattr(config, "routed_scaling_factor", 1.0)


# Model -> its keys, and the weights of experts `ids` [t, k] by the router's scores z [t, experts], in NumPy.
FAMILIES = {
    "Qwen3Moe": ({"num_experts": EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}, normalized),
    "Qwen2Moe": ({"num_experts": EXPERTS, "shared_expert_intermediate_size": 16}, all_scores),
    "Olmoe": ({"num_experts": EXPERTS}, all_scores),
    "Mixtral": ({"num_local_experts": EXPERTS}, normalized),
    "GptOss": ({"num_local_experts": EXPERTS, "sliding_window": 4}, of_chosen),
    "GraniteMoe": ({"num_local_experts": EXPERTS}, of_chosen),
    "Ernie4_5_Moe": ({"moe_num_experts": EXPERTS, "moe_layer_start_index": 0}, normalized),
    "HunYuanMoEV1": ({"num_experts": EXPERTS, "moe_topk": CHOSEN}, normalized),
    "MiniMaxM2": ({"num_local_experts": EXPERTS}, sigmoids),
    "Lfm2Moe": (
        {"num_experts": EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
        sigmoids,
    ),
    "Glm4Moe": ({"n_routed_experts": EXPERTS, "first_k_dense_replace": 1}, sigmoids),
    "DeepseekV3": ({**LATENT, "first_k_dense_replace": 1}, sigmoids),
    "DeepseekV2": (
        {**LATENT, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        lambda z, ids, config: take(softmax(z), ids) * config.routed_scaling_factor,
    ),
    "Qwen3_5Moe": (
        {
            "num_experts": EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        normalized,
    ),
}  # fmt: skip

BY_SCORE = FAMILIES.keys() - {"Ernie4_5_Moe", "MiniMaxM2", "Lfm2Moe", "Glm4Moe", "DeepseekV3", "DeepseekV2"}
"""Models that choose the experts of the largest scores; others add a bias or limit the groups."""


def configuration(family, **changes):
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    return kind(**{**SIZES, **FAMILIES[family][0], **changes})


def build(family, replays=True, seed=0, **changes):
    torch.manual_seed(seed)
    options = {"dtype": torch.float32, "attn_implementation": varlen_attention.implementation("auto")}
    model = transformers.AutoModelForCausalLM.from_config(configuration(family, **changes), **options)
    return PolicyModel(model.eval(), replays_routes=replays)


def make(routes=None, lengths=LENGTHS, seed=0):
    random = np.random.default_rng(seed)
    mask = np.concatenate([np.arange(n) > 0 for n in lengths])
    streams = {} if routes is None else {"routed_experts": routes}
    return make_micro_batch(random.integers(3, 64, sum(lengths)), mask, lengths, streams=streams)


def draw_routes(tokens=TOKENS, seed=0, last=LAST, layers=LAYERS, experts=EXPERTS, chosen=CHOSEN):
    random = np.random.default_rng(seed)
    routes = random.random((tokens, layers, experts)).argsort(-1)[..., :chosen].astype(np.uint8)
    routes[last] = 0
    return routes


class Calls:
    """The arguments of a policy's routers and experts, by layer: scores of all experts, ids, weights."""

    def __init__(self, policy):
        self.logits, self.ids, self.weights = {}, {}, {}
        for name, module in policy.causal_lm.named_modules():
            if "experts" in module._modules and name.split(".")[-2].isdigit():
                layer = int(name.split(".")[-2])
                router = module._modules.get("gate", module._modules.get("router"))
                router.register_forward_pre_hook(lambda m, args, layer=layer: self.route(layer, m, args))
                module.experts.register_forward_pre_hook(lambda m, args, layer=layer: self.call(layer, args))

    def route(self, layer, router, args):
        named = dict(router.named_parameters())
        weight = next(p for n, p in named.items() if n.endswith("weight"))
        scores = args[0].reshape(-1, weight.shape[1]).float() @ weight.T
        self.logits[layer] = (scores + named["bias"] if "bias" in named else scores).detach().double().numpy()

    def call(self, layer, args):
        self.ids[layer], self.weights[layer] = (x.detach().numpy() for x in args[1:3])

    def routes(self):
        """Record the choices as the sampler does."""
        some = next(iter(self.ids.values()))
        routes = np.zeros((len(some), LAYERS, some.shape[1]), np.uint8)
        for layer, ids in self.ids.items():
            routes[:, layer] = ids
        routes[LAST] = 0
        return routes


def results(policy, row):
    """Log-probabilities and gradients of a weighted sum of them."""
    policy.zero_grad()
    logprobs = policy(row)[0]
    (logprobs * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def metrics(policy):
    return policy.replay.reduce(lambda totals: totals, torch.device("cpu"))


def assert_equal(got, wanted, tolerance=1e-6):
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=tolerance)
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(got[1][name] / scale, gradient / scale, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_the_own_choices_changes_nothing(family):
    plain = build(family, replays=False)
    calls = Calls(plain)
    wanted = results(plain, make())
    policy = build(family)
    assert_equal(results(policy, make(calls.routes())), wanted)
    assert metrics(policy) == {"routing/replayed": 1.0, "routing/disagreement": 0.0}
    assert set(metrics(policy).values()) == {None}
    assert_equal(results(plain, make(draw_routes())), wanted)  # a policy that does not replay ignores records


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_experts_are_the_recorded_ones_with_weights_of_the_router(family):
    policy = build(family)
    calls, routes = Calls(policy), draw_routes()
    without = np.arange(len(routes)) % 5 == 2  # as tokens behind the server's limit
    routes[without] = 0
    policy(make(routes))
    recorded = np.flatnonzero((routes != routes[..., :1]).any((1, 2)))
    assert len(recorded) > 20 and calls.ids.keys() == policy.replay.num_experts.keys()
    differing = []
    for layer, ids in calls.ids.items():
        np.testing.assert_array_equal(ids[recorded], routes[recorded, layer])
        assert all(len(set(chosen)) == CHOSEN for chosen in ids.tolist())
        wanted = FAMILIES[family][1](calls.logits[layer], ids, policy.causal_lm.config)
        np.testing.assert_allclose(calls.weights[layer], wanted, rtol=1e-4, atol=1e-6)
        if family in BY_SCORE:
            own = np.argsort(-calls.logits[layer], axis=1)[:, :CHOSEN]
            assert all(set(ids[token]) == set(own[token]) for token in np.flatnonzero(without))
            differing += [len(set(routes[t, layer]) - set(own[t])) for t in recorded]
    got = metrics(policy)
    assert got["routing/replayed"] == pytest.approx(len(recorded) / (TOKENS - len(LENGTHS)))
    assert got["routing/disagreement"] > 0.1
    if family in BY_SCORE:
        assert got["routing/disagreement"] == pytest.approx(np.mean(differing) / CHOSEN)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "Glm4Moe", "DeepseekV3", "DeepseekV2"])
def test_gradient_of_a_replayed_router_equals_finite_differences(family):
    policy, row = build(family), make(draw_routes())
    slope = torch.randn(len(row.tokens), generator=torch.Generator().manual_seed(1))
    _, gradients = results(policy, row)
    layer = max(policy.replay.num_experts)
    name = next(n for n in gradients if f"layers.{layer}." in n and n.endswith(("gate.weight", "router.weight")))
    weight = policy.get_parameter(name)
    direction, size = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)), 1e-2

    def loss(step):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            value = (policy(row)[0].double() * slope).sum().item()
            weight.sub_(direction, alpha=step)
        return value

    wanted = (loss(size) - loss(-size)) / (2 * size)
    assert (gradients[name] * direction).sum().item() == pytest.approx(wanted, rel=1e-2) and abs(wanted) > 1e-2


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "HunYuanMoEV1", "DeepseekV2"])
def test_selective_recomputation_of_own_choices_gives_equal_gradients(family):
    """Routers that divide the chosen scores in place."""
    plain, policy, row = build(family, replays=False), build(family, replays=False), make(draw_routes())
    prepare_blocks(policy, TrainerModelConfig(ac=ActivationCheckpointConfig(mode="selective")))
    assert_equal(results(policy, row), results(plain, row))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3", "GraniteMoe"])
def test_recomputed_activations_give_equal_gradients_and_metrics(family, mode):
    plain, policy, row = build(family), build(family), make(draw_routes())
    prepare_blocks(policy, TrainerModelConfig(ac=ActivationCheckpointConfig(mode=mode, freq=2)))
    calls = Calls(policy)
    assert_equal(results(policy, row), results(plain, row))
    assert metrics(policy) == metrics(plain)
    kept = np.setdiff1d(np.arange(TOKENS), LAST)
    for layer, ids in calls.ids.items():  # of the recomputation, if the block is recomputed
        np.testing.assert_array_equal(ids[kept], row.routed_experts[kept, layer])


@pytest.mark.parametrize("lora", [None, {"rank": 8}])  # with adapters, the reference is the policy without them
def test_proximal_policy_replays_and_reference_model_does_not(lora, tmp_path, world):
    save("Qwen3Moe", tmp_path)
    name = str(tmp_path)
    model = {"name": name, "router_replay": True, "lora": lora}
    config = TrainerConfig(model=model, loss={"type": "decoupled_ppo", "kl": {"coef": 0.1}}, output_dir=tmp_path)
    policy = make_policy(config.model, 0, world)
    row = make(draw_routes())
    minibatches = [Minibatch([row], Counts(int(row.loss_mask.sum())))] * 2
    scored = References(config, policy, world).score(minibatches)[1].rows[0]
    with torch.no_grad():
        replayed, own = policy(row)[0], policy(replace(row, routed_experts=None))[0]
    torch.testing.assert_close(scored.proximal_logprobs, replayed)
    torch.testing.assert_close(scored.ref_logprobs, own)
    assert (replayed - own).abs().max() > 1e-2
    assert set(metrics(policy).values()) == {None}  # only training is counted


def save(family, path, **changes):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(configuration(family, **changes)).save_pretrained(path)


def test_row_without_trained_tokens_counts_and_padding_does_not():
    """I9: truncated samples may fill a row on one layout of ranks, and share it with others on another."""
    policy, routes = build("Qwen3Moe"), draw_routes()
    row = make(routes)
    policy(row)
    wanted = metrics(policy)
    policy(make_micro_batch(row.tokens.numpy(), np.zeros(TOKENS), LENGTHS, streams={"routed_experts": routes}))
    policy(masked_row({"routed_experts": routes}))
    assert metrics(policy) == wanted


# Layouts of ranks

LAYOUTS = {"data": {}, "ep": {"ep": 2}, "tp": {"tp": 2}, "cp": {"cp": {"degree": 2}}}
ROWS = [(23, 9, 2), (31,), (5, 4, 3, 17)]


def train(world, argument):
    """Take a step in each layout; return its results, the gradient of a router, and what the node shared."""
    answers = {}
    for name, keys in argument["layouts"].items():
        config = TrainerModelConfig(name=argument["path"], router_replay=True, **keys)
        parallel = Layout.of(config, world.size).model_parallel_size
        ranks = replace(world, model_parallel_size=parallel)
        policy = make_policy(config, 0, ranks)
        check_packing(policy, config, ranks, 512)
        optimizer, gradients = build_optimizer(AdamWConfig(lr=1e-3), policy), []
        router = policy.causal_lm.model.layers[0].mlp.gate.weight
        optimizer.register_step_pre_hook(lambda *_, p=router, g=gradients: g.append(p.grad.full_tensor().tolist()))
        rows = []
        for number, lengths in enumerate(ROWS):
            routes = draw_routes(sum(lengths), number, np.cumsum(lengths) - 1, experts=4, chosen=2)
            routes[:: number + 3] = 0
            rows.append(make(routes, lengths, number))
        assigned = assign_rows([len(row.tokens) for row in rows], ranks.data_size)[ranks.data_rank]
        padding = masked_row({"routed_experts": routes})
        mine = [padding if i == PADDING_ROW else rows[i] for i in assigned]
        minibatch = Minibatch(mine, Counts(sum(int(row.loss_mask.sum()) for row in rows)))
        result = TrainStep(policy, optimizer, ranks, max_norm=1.0).step([minibatch], sequence_objective, 1.0)
        answers[name] = {"loss": result.loss, "norm": result.grad_norm, "router": gradients[0], "means": result.means}
    wide = {"routed_experts": np.arange(24, dtype=np.uint16).reshape(3, 4, 2) + 300}
    shared, _ = NodeRanks(world).share(lambda: (wide, None))
    answers["shared"] = bool((shared["routed_experts"] == wide["routed_experts"]).all())
    return answers


def test_layout_of_ranks_does_not_change_results(tmp_path):
    """I9: data, expert, tensor and context parallelism, with a padding row."""
    save("Qwen3Moe", tmp_path, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[])
    argument = {"path": str(tmp_path), "layouts": {"alone": {}}}
    (wanted,) = run_world(1, train, argument, tmp_path)
    answers = run_world(2, train, {**argument, "layouts": LAYOUTS}, tmp_path)
    alone = wanted["alone"]
    assert 0.5 < alone["means"]["routing/replayed"] < 1 and 0.1 < alone["means"]["routing/disagreement"] < 0.9
    for answer in answers:
        assert answer.pop("shared")
        for name, got in answer.items():
            assert got["loss"] == pytest.approx(alone["loss"], rel=1e-5), name
            assert got["norm"] == pytest.approx(alone["norm"], rel=1e-5), name
            assert got["means"] == pytest.approx(alone["means"], rel=1e-5), name
            np.testing.assert_allclose(got["router"], alone["router"], atol=1e-5, err_msg=name)


# Batches

BATCH = fake_batch(FakeDataConfig(batch_size=6, seq_len=20, variable_length=True), 64, 40, 0, 0)


def with_routes(**changes):
    replay = build("Qwen3Moe", **changes).replay
    return replace(BATCH, routed_experts=fake_routes(BATCH.seq_lens, replay, 0, 0))


@pytest.mark.parametrize(("experts", "dtype", "moved"), [(8, np.uint8, torch.uint8), (300, np.uint16, torch.int16)])
def test_records_of_a_batch_reach_the_rows(experts, dtype, moved):
    batch = with_routes(num_experts=experts)
    batch.validate()
    assert batch.routed_experts.dtype == dtype and batch.routed_experts.max() in range(experts - 20, experts)
    row = make_row(batch, [0, 1], 0)
    assert row.routed_experts.dtype == moved
    part = np.concatenate([batch.routed_experts[batch.row(r)] for r in (0, 1)])
    np.testing.assert_array_equal(row.routed_experts.numpy(), part)
    padding = masked_row({"routed_experts": batch.routed_experts[:0]})
    assert padding.routed_experts.shape == (2, LAYERS, CHOSEN) and not padding.routed_experts.any()
    policy = build("Qwen3Moe", num_experts=experts)
    policy.check_row(row)
    policy.check_row(padding)
    calls = Calls(policy)
    policy(row)
    kept = (part != part[..., :1]).any((1, 2))
    np.testing.assert_array_equal(calls.ids[0][kept], part[kept, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: routes.astype(np.int32), "routed_experts is int32, not uint8 or uint16"),
        (lambda routes: routes[1:], r"routed_experts has shape \(\d+, 3, 3\), not"),
        (lambda routes: routes[..., 0], "routed_experts has shape"),
        (lambda routes: np.where(routes.any((1, 2), keepdims=True), routes, routes[0]), "last token of a sample"),
    ],
)
def test_batch_with_invalid_records_is_refused(change, message):
    batch = with_routes()
    with pytest.raises(ValueError, match=message):
        replace(batch, routed_experts=change(batch.routed_experts)).validate()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "the batch has no routed_experts.* set enable_return_routed_experts .* or set model.router_replay"),
        (draw_routes(layers=2), "have 2 layers and 3 experts per token, but .* has 3 and 3; let the server"),
        (draw_routes(chosen=2), "have 3 layers and 2 experts per token, but .* has 3 and 3; let the server"),
        (np.where(draw_routes() == 7, 8, draw_routes()), "contain expert 8 in layer 0, but .* has 8 experts"),
        (draw_routes().astype(np.uint16) + 40000, "contain expert 40007 in layer 0"),
    ],
)
def test_records_that_do_not_fit_the_model_are_refused(routes, message):
    with pytest.raises(ConfigError, match=message):
        build("Qwen3Moe").check_row(make(routes))


# Refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.Qwen3Config(**SIZES), "model.router_replay: .* has no mixtures of experts"),
        (lambda: configuration("Qwen3Moe", num_experts_per_tok=1), "chooses 1 experts per token; .* at least 2"),
        (
            lambda: configuration("HunYuanMoEV1", num_experts_per_tok=[2, 3, 2], moe_topk=[2, 3, 2]),
            "chooses 2 or 3 experts per token",
        ),
    ],
)
def test_model_without_several_experts_per_token_is_refused(config, message, tmp_path):
    transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    with pytest.raises(ConfigError, match=message):
        load_policy(TrainerModelConfig(name=str(tmp_path), router_replay=True), seed=0)


def test_router_with_its_own_selection_is_refused_at_startup(tmp_path, world):
    config = transformers.PhimoeConfig(**{**SIZES, "num_experts_per_tok": 2}, num_local_experts=EXPERTS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = TrainerModelConfig(name=str(tmp_path), router_replay=True)
    policy = make_policy(model, 0, world)
    with pytest.raises(
        ConfigError, match=r"routers of .* are not supported: .*Phimoe.* chooses 2 of 8 experts 0 times"
    ):
        check_packing(policy, model, world, 512)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: TrainerModelConfig(router_replay=True, compile={}), "router_replay does not support compile"),
        (lambda: SFTConfig.model_validate({"model": {"router_replay": True}}), "model.router_replay is for the RL"),
        (
            lambda: TrainerConfig.model_validate(
                {
                    "model": {"router_replay": True, "lora": {"publish": "adapter"}},
                    "max_concurrent_runs": 2,
                    "max_steps": None,
                }
            ),
            "model.router_replay is not supported with several runs",
        ),
    ],
)
def test_settings_that_do_not_replay_are_refused(load, message):
    with pytest.raises(ValueError, match=message):
        load()
