"""Log-probabilities of the policy equal those of transformers, packed or not (I8); other models are refused."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import DebugModelConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.model.lm_head import check_output_head
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = {
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen2_tied": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral_window": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma3_window": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=4),
    "gemma4_heads_of_two_sizes": lambda: transformers.Gemma4TextConfig(
        **SMALL, head_dim=16, global_head_dim=32, sliding_window=4, vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=16, layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gemma2_softcapped_logits": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=4, final_logit_softcapping=3.0, attn_logit_softcapping=2.0
    ),
    "nanochat_softcapped_logits": lambda: transformers.NanoChatConfig(**SMALL, final_logit_softcapping=3.0),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    ),
    "phi_biased_head": lambda: transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 4}),
    "phi3_window": lambda: transformers.Phi3Config(**SMALL, sliding_window=5),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "granite_scaled_logits": lambda: transformers.GraniteConfig(
        **SMALL, logits_scaling=2.0, embedding_multiplier=1.5, residual_multiplier=0.9, attention_multiplier=0.3
    ),
    "cohere_scaled_logits": lambda: transformers.CohereConfig(**SMALL),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "qwen3_moe_some_dense": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[1]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss_sinks_window": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, kv_lora_rank=8, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, n_group=2, topk_group=1,
    ),
}  # fmt: skip
LENGTHS = [9, 2, 17, 1, 12]


def segments(vocabulary, lengths=LENGTHS):
    random = np.random.default_rng(0)
    return [random.integers(3, vocabulary, n) for n in lengths]


def pack(parts, temperature=1.0):
    tokens = np.concatenate(parts)
    return make_micro_batch(
        tokens,
        np.concatenate([np.arange(len(p)) > 0 for p in parts]),
        [len(p) for p in parts],
        temperature=np.full(len(tokens), temperature, np.float32),
    )


def save(config, path: Path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers' sdpa, its default, ignores the cap
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_and_gradients_equal_those_of_transformers(name, tmp_path):
    reference = save(ARCHITECTURES[name](), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    parts, temperature = segments(64), 0.7
    weights = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    logprobs, entropy = policy(pack(parts, temperature))
    (logprobs * weights).sum().backward()
    rows = zip(parts, logprobs.split(LENGTHS), entropy.split(LENGTHS), weights.split(LENGTHS), strict=True)
    for part, got, spread, weight in rows:
        every = torch.log_softmax(reference(torch.from_numpy(part)[None]).logits[0] / temperature, -1)
        wanted = every[:-1].gather(1, torch.from_numpy(part[1:, None]))[:, 0]
        torch.testing.assert_close(got[1:], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(spread[1:], -(every.exp() * every).sum(-1)[:-1], rtol=1e-4, atol=1e-5)
        assert got[0] == spread[0] == 0
        (wanted * weight[1:]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for key, parameter in policy.causal_lm.named_parameters():
        scale = gradients[key].abs().max().clamp(min=1.0)
        torch.testing.assert_close(parameter.grad / scale, gradients[key] / scale, rtol=0, atol=1e-5, msg=key)


def test_bfloat16_forward_equals_transformers_with_float32_weights(world, tmp_path):
    exact = save(ARCHITECTURES["qwen3_moe"](), tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    policy = make_policy(TrainerModelConfig(name=str(tmp_path), dtype="bfloat16"), 0, world)
    (part,) = segments(64, [40])
    logprobs = policy(pack([part]))[0]
    logprobs.sum().backward()
    assert {p.dtype for p in policy.parameters()} == {p.grad.dtype for p in policy.parameters()} == {torch.float32}
    with torch.no_grad():
        tokens = torch.from_numpy(part)
        wanted, in_float32 = (
            torch.log_softmax(model(tokens[None]).logits[0].float(), -1)[:-1].gather(1, tokens[1:, None])[:, 0]
            for model in (reference, exact)
        )
    rounding = (wanted - in_float32).abs()
    assert (logprobs[1:] - in_float32).abs().mean() > 1e-4  # it is not float32 in disguise
    assert (logprobs[1:] - in_float32).abs().mean() < 2 * rounding.mean()
    assert (logprobs[1:] - wanted).abs().max() < 2 * rounding.max()


@pytest.mark.parametrize(("attn", "tied"), [("varlen", True), ("varlen", False), ("sdpa", True), ("eager", True)])
def test_packed_samples_have_the_logprobs_and_gradients_of_single_ones(tmp_path, attn, tied):
    """I8: log-probabilities and gradients of packed and single samples are equal to 1e-5 in fp32."""
    path = make_tiny_model(tmp_path, tie_word_embeddings=tied)
    policy = load_policy(TrainerModelConfig(name=str(path), attn=attn), seed=0)
    parts = segments(103)
    weights = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))

    def gradients(rows):
        policy.zero_grad()
        logprobs = torch.cat([policy(row)[0] for row in rows])
        (logprobs * weights).sum().backward()
        return logprobs, {n: p.grad.clone() for n, p in policy.named_parameters()}

    packed, packed_gradients = gradients([pack(parts)])
    single, single_gradients = gradients([pack([part]) for part in parts])
    torch.testing.assert_close(packed, single, rtol=0, atol=1e-5)
    for name, gradient in single_gradients.items():
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(packed_gradients[name] / scale, gradient / scale, rtol=0, atol=1e-5)


def test_only_masked_tokens_are_scored(tiny):
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    tokens, mask = segments(103, [12])[0], np.arange(12) > 7
    full, _ = policy(pack([tokens]))
    logprobs, entropy = policy(make_micro_batch(tokens, mask, [12]))
    torch.testing.assert_close(logprobs[8:], full[8:])
    assert (logprobs[:8] == 0).all() and (entropy[:8] == 0).all()


def test_micro_batch_with_a_trained_first_token_raises():
    with pytest.raises(ValueError, match="first token"):
        make_micro_batch(np.arange(4), np.array([0, 1, 1, 1]), [2, 2])


def test_debug_options_give_equal_weights_on_every_rank(tiny):
    config = TrainerModelConfig(name=str(tiny), debug=DebugModelConfig(num_layers=1, random_init=True))
    one, two, other = (load_policy(config, seed) for seed in (1, 1, 2))
    assert len(one.blocks) == 1
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


@pytest.mark.parametrize(
    ("name", "message"),
    [*((name, "does not exist") for name in ("/no/such/model", "./no/such/model", "a/b/c")), ("{}", r"model\.name")],
)
def test_missing_model_raises_one_line(name, message, tmp_path):
    assert_refused(name.format(tmp_path), message)
    with pytest.raises(ConfigError, match=r"tokenizer\.name"):
        load_tokenizer(TokenizerConfig(name=str(tmp_path)), TrainerModelConfig())


def assert_refused(name, message, **keys):
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(TrainerModelConfig(name=str(name), **keys), seed=0)
    assert "\n" not in str(caught.value)


REFUSED = {
    "linear_attention": lambda: transformers.MiniMaxConfig(
        **SMALL, head_dim=8, num_local_experts=4, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "more than one matrix": lambda: transformers.RecurrentGemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, lru_width=32
    ),
    "does not name the classes of its blocks": lambda: transformers.CTRLConfig(
        vocab_size=64, n_positions=64, n_embd=32, dff=48, n_layer=2, n_head=4
    ),
    "does not use transformers' attention interface": lambda: transformers.BloomConfig(
        vocab_size=64, hidden_size=32, n_layer=2, n_head=4
    ),
    "blocks that share weights": lambda: transformers.Zamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, mamba_ngroups=1, n_mamba_heads=4,
        mamba_d_state=8, num_mem_blocks=1, adapter_rank=4, layers_block_type=[*["mamba"] * 3, "hybrid", *["mamba"] * 2],
    ),
    "is not a decoder": lambda: transformers.BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4),
    "is quantized": lambda: transformers.LlamaConfig(**SMALL, quantization_config={"quant_method": "fp8"}),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "wide"), ("num_attention_heads", 0)])
def test_invalid_model_configuration_raises_one_line(key, value, tmp_path):
    config = ARCHITECTURES["llama"]().to_dict() | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(tmp_path, rf"^model\.name: cannot load '{tmp_path}'")


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed")
def test_attention_kernel_that_is_not_installed_raises_with_its_key(tiny):
    message = r"^model\.attn 'flash_attention_2': .*; set model\.attn to 'auto'$"
    assert_refused(tiny, message, attn="flash_attention_2")


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_model_is_refused(reason, tmp_path):
    """Judged by the configuration, before anything is read."""
    REFUSED[reason]().save_pretrained(tmp_path)
    assert_refused(tmp_path, reason)


@pytest.mark.parametrize(
    ("name", "divisor", "softcap", "others"),
    [
        ("granite_scaled_logits", 2.0, None, [(1.0, None), (3.0, None)]),
        ("nanochat_softcapped_logits", 1.0, 3.0, [(1.0, None), (1.0, 2.9)]),
    ],
)
def test_output_head_with_another_scale_or_softcap_is_refused(name, divisor, softcap, others):
    """The check leaves the model as it was."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]())
    before = dict(model.named_modules())
    check_output_head("tiny", model, divisor, softcap)
    assert dict(model.named_modules()) == before
    for other in others:
        with pytest.raises(ConfigError, match="more than one matrix"):
            check_output_head("tiny", model, *other)


def test_output_head_that_scales_states_first_is_refused():
    """In the model's own code between backbone and logits, under names that no list has."""

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **options):
            states = self.model(input_ids=input_ids, **options)[0]
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(states / 4))

    with pytest.raises(ConfigError, match="more than one matrix"):
        check_output_head("tiny", Scaled(ARCHITECTURES["llama"]()), 1.0)


@pytest.mark.parametrize(
    ("name", "attn", "message"),
    [
        ("gemma2_softcapped_logits", "sdpa", "sdpa' ignores"),
        ("gpt_oss_sinks_window", "eager", "without position ids"),  # its mask ignores segments
    ],
)
def test_attention_that_ignores_a_setting_of_the_model_is_refused(name, attn, message, tmp_path):
    ARCHITECTURES[name]().save_pretrained(tmp_path)
    assert_refused(tmp_path, message, attn=attn)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.NemotronConfig(**SMALL), "does not get the segment boundaries"),
        # Keeps some of the tokens before it only; without the mask it would attend to all.
        (lambda: transformers.DogeConfig(**SMALL, head_dim=8), "DogeAttention creates its own attention mask"),
    ],
)
def test_model_that_does_not_pass_segments_to_attention_is_refused(config, message, tmp_path):
    save(config(), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    with pytest.raises(ConfigError, match=message):
        policy(pack(segments(64)))


def test_tokens_and_positions_without_an_embedding_are_refused(tmp_path):
    """On a GPU they would end the process with an assertion of the device, far from here."""
    save(ARCHITECTURES["gpt2"](), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    policy.check_row(pack([np.array([1, 63]), np.ones(64, int)]))
    for token in (64, -1):
        with pytest.raises(ConfigError, match=f"contains token {token}, but {tmp_path} has 64 tokens"):
            policy.check_row(pack([np.array([1, token])]))
    with pytest.raises(ConfigError, match=r"a sample of 65 tokens, but .* has 64 positions"):
        policy.check_row(pack([np.ones(65, int)]))
