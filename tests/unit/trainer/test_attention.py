"""How the CUDA kernel is called, with a stand-in of its signature on a CPU; the kernel itself where there is a GPU."""

from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen as varlen

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer import attention
from prime_rl.trainer.model import load_policy
from prime_rl.trainer.parallel import join_world, shard
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_model import LENGTHS, pack, segments


def by_definition(q, k, v, bounds_q, bounds_k, longest_q, longest_k, *, scale, window_size, heads_per_kv):
    """Attention token by token; q [T, H, D]. Asserts what the kernel would."""
    assert torch.equal(bounds_q, bounds_k) and longest_q == longest_k == max(bounds_q.diff())
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and window_size[1] == 0
    out = torch.zeros(q.shape)
    for begin, end in pairwise(bounds_q.tolist()):
        for t in range(begin, end):
            first = begin if window_size[0] < 0 else max(begin, t - window_size[0])
            for h in range(q.shape[1]):
                keys = k[first : t + 1, h // heads_per_kv]
                weights = torch.softmax(keys @ q[t, h] * scale, 0)
                out[t, h] = weights @ v[first : t + 1, h // heads_per_kv]
    return out


def new_kernel(*args, scale=None, window_size=(-1, -1), enable_gqa=False):
    """The signature of torch 2.13."""
    assert enable_gqa
    return by_definition(*args, scale=scale, window_size=window_size, heads_per_kv=2)


def old_kernel(*args, scale=None, window_size=(-1, -1)):
    """The signature of torch 2.11: one key head per query head."""
    return by_definition(*args, scale=scale, window_size=window_size, heads_per_kv=1)


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_is_called_as_segments_need(monkeypatch, kernel, window):
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    attention._knows_grouped_queries.cache_clear()
    bounds = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    shared = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": bounds, "max_length_q": 6}
    wanted, _ = attention.rl_varlen(torch.nn.Module(), query, key, value, None, **shared)
    got = attention._flash(query, key, value, bounds, 6, 0.3, window)
    attention._knows_grouped_queries.cache_clear()
    assert got.shape == wanted.shape == (1, 11, 4, 8)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 0.0]])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_and_softcapped_scores_are_computed_by_definition(softcap, sinks, window):
    bounds = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    got, _ = attention.rl_varlen(
        torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=6, scaling=0.7,
        sliding_window=window, softcap=softcap, s_aux=None if sinks is None else torch.tensor(sinks),
    )  # fmt: skip
    for begin, end in pairwise(bounds.tolist()):
        for t in range(begin, end):
            first = begin if window is None else max(begin, t + 1 - window)
            for h in range(4):
                scores = 0.7 * (key[0, h // 2, first : t + 1] @ query[0, h, t])
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else torch.tensor(sinks[h]).exp()))
                torch.testing.assert_close(got[0, t, h], weights @ value[0, h // 2, first : t + 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_packing_is_invisible_on_cuda(tmp_path, dtype, tolerance):
    """I8 with FSDP, mixed precision and the real kernel."""
    config = TrainerModelConfig(name=str(make_tiny_model(tmp_path)), dtype=dtype)
    reference = load_policy(config, seed=0)
    parts = segments(103)
    with join_world("cuda", 60) as world:
        policy = shard(load_policy(config, seed=0), config, world)
        packed, _ = policy(pack(parts).to(world.device))
        packed.sum().backward()
    with torch.no_grad():
        single = torch.cat([reference(pack([part]))[0] for part in parts])
    assert len(packed) == sum(LENGTHS)
    torch.testing.assert_close(packed.cpu(), single, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("bounds", "extra", "taken"),
    [([0, 11], {}, True), ([0, 4, 11], {}, False), ([0, 11], {"sliding_window": 3}, False)],
)
def test_only_a_long_row_of_one_segment_goes_to_cudnn(monkeypatch, bounds, extra, taken):
    """With stand-ins, on a CPU: a tensor that calls itself one of CUDA, and torch's own kernel in cuDNN's place."""
    rows = []

    def attend(query, key, value, scale):
        rows.append(query.shape)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )

    class Claims(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(attention.cudnn_attention, "attend", attend)
    monkeypatch.setattr(attention.cudnn_attention, "LEAST_TOKENS", 8)
    monkeypatch.setattr(
        attention,
        "_flash",
        lambda q, k, v, b, *_: attention.segment_attention(
            *(x.as_subclass(torch.Tensor) for x in (q, k, v)), b, 0.3, extra.get("sliding_window")
        )[0].transpose(1, 2),
    )
    query, key, value = (torch.randn(1, heads, 11, 16).bfloat16() for heads in (4, 2, 2))
    options = {"cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32), "max_length_q": 11, "scaling": 0.3, **extra}
    wanted, _ = attention.rl_varlen(torch.nn.Module(), query, key, value, None, **options)
    got, _ = attention.rl_varlen_long(torch.nn.Module(), query.as_subclass(Claims), key, value, None, **options)
    assert bool(rows) == taken
    torch.testing.assert_close(got.as_subclass(torch.Tensor), wanted, rtol=0, atol=2e-2)


def test_what_attn_stands_for(monkeypatch):
    monkeypatch.setattr(attention, "_cudnn_works", lambda: True)
    assert [attention.implementation(a) for a in ("auto", "varlen", "sdpa")] == ["rl_varlen_long", "rl_varlen", "sdpa"]
    monkeypatch.setattr(attention, "_cudnn_works", lambda: False)
    assert attention.implementation("auto") == "rl_varlen"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cudnn_agrees_where_it_is_used():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older than Hopper")
    assert attention.cudnn_attention.works_here()
