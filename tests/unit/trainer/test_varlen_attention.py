"""Arguments of the CUDA kernel, with a stand-in on a CPU; the kernel itself on a GPU."""

from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen as varlen
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model import varlen_attention
from prime_rl.trainer.model.varlen_attention import packed_attention, segment_attention
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import LENGTHS, pack, segments


def by_definition(q, k, v, bounds, *, scale, window=None, softcap=None, sinks=None):
    """Attention token by token; q [T, H, D], k and v [T, H / 2, D]."""
    out = torch.zeros(q.shape)
    for begin, end in pairwise(bounds.tolist()):
        for t in range(begin, end):
            first = begin if window is None else max(begin, t + 1 - window)
            for h in range(q.shape[1]):
                scores = scale * (k[first : t + 1, h // 2] @ q[t, h])
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[h].exp()))
                out[t, h] = weights @ v[first : t + 1, h // 2]
    return out


def kernel(q, k, v, bounds_q, bounds_k, longest_q, longest_k, scale=None, window_size=(-1, -1), enable_gqa=False):
    """The signature of torch 2.13. Asserts what the kernel would."""
    assert enable_gqa and window_size[1] == 0
    assert torch.equal(bounds_q, bounds_k) and longest_q == longest_k == max(bounds_q.diff())
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    return by_definition(q, k, v, bounds_q, scale=scale, window=None if window_size[0] < 0 else window_size[0] + 1)


@pytest.mark.parametrize("window", [None, 3])
def test_flash_kernel_gets_the_segments_and_window(monkeypatch, window):
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    # Two segments have the same length, which are attended to together without the kernel.
    bounds = torch.tensor([0, 4, 5, 9, 15], dtype=torch.int32)
    query, key, value = torch.randn(1, 4, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)
    shared = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": bounds, "max_length_q": 6}
    wanted, _ = varlen_attention.packed_attention(torch.nn.Module(), query, key, value, None, **shared)
    got = varlen_attention._flash(query, key, value, bounds, 6, 0.3, window)
    assert got.shape == wanted.shape == (1, 15, 4, 8)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("window", "sinks", "softcap"),
    [(None, None, None), (3, None, None), (None, True, None), (3, True, None), (None, None, 2.0), (3, True, 2.0)],
)
def test_sinks_and_softcap_equal_their_definition(softcap, sinks, window):
    bounds = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    got, _ = varlen_attention.packed_attention(
        torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=6, scaling=0.7,
        sliding_window=window, softcap=softcap, s_aux=sinks,
    )  # fmt: skip
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    wanted = by_definition(*rows, bounds, scale=0.7, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(got[0], wanted)


class Largest(TorchDispatchMode):
    """Notes the most elements that any operator returns."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self.most = max(self.most, one.numel())
        return result


def test_sinks_use_memory_linear_in_the_row():
    """Forward and backward of one long segment; all its scores would be 4 x 1024 x 1024."""
    heads, length, width = 4, 1024, 8
    bounds = torch.tensor([0, length], dtype=torch.int32)
    query = torch.randn(1, heads, length, width, requires_grad=True)
    key, value = (torch.randn(1, 2, length, width, requires_grad=True) for _ in range(2))
    sinks = torch.zeros(heads, requires_grad=True)
    with Largest() as largest:
        out, _ = varlen_attention.packed_attention(
            torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=length, scaling=0.3,
            s_aux=sinks,
        )  # fmt: skip
        out.square().sum().backward()
    assert sinks.grad.abs().min() > 0 and query.grad is not None
    assert largest.most <= heads * length * (2 * 16 + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_packed_samples_on_cuda_have_the_logprobs_of_single_ones(tmp_path, dtype, tolerance):
    """I8 with FSDP, mixed precision and the real kernel."""
    config = TrainerModelConfig(name=str(make_tiny_model(tmp_path)), dtype=dtype)
    reference = load_policy(config, seed=0)
    parts = segments(103)
    with join_world("cuda", 60) as world:
        policy = shard_policy(load_policy(config, seed=0), config, world)
        packed, _ = policy(pack(parts).to(world.device))
        packed.sum().backward()
    with torch.no_grad():
        single = torch.cat([reference(pack([part]))[0] for part in parts])
    assert len(packed) == sum(LENGTHS)
    torch.testing.assert_close(packed.cpu(), single, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("attn", "capability", "installed", "calls"),
    [
        ("auto", (9, 0), True, ["FA3"]),  # also if it fails to load
        ("auto", (8, 0), True, []),
        ("auto", None, True, []),
        ("auto", (9, 0), False, []),
        ("varlen", (9, 0), True, []),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_auto_activates_flash_attention_3_on_hopper_if_installed(
    monkeypatch, attn, capability, installed, calls, fails
):
    called = []

    def activate(name):
        called.append(name)
        if fails:
            raise RuntimeError("Module 'flash_attn_interface' does not expose FA3 kernels")

    monkeypatch.setattr(varlen_attention, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(varlen_attention.torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(varlen_attention.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(varlen_attention, "activate_flash_attention_impl", activate)
    varlen_attention._activate_flash_attention_3.cache_clear()
    assert varlen_attention.implementation(attn) == varlen_attention.ATTENTION_NAME
    assert called == calls
    varlen_attention._activate_flash_attention_3.cache_clear()
    assert [varlen_attention.implementation(name) for name in ("sdpa", "eager")] == ["sdpa", "eager"]


# The attention operator of compiled blocks on a CPU equals eager attention (I8)


BOUNDS = torch.tensor([0, 4, 5, 17], dtype=torch.int32)


def inputs(kv_heads, dtype):
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 17, 16), (1, kv_heads, 17, 16), (1, kv_heads, 17, 16))
    return [torch.randn(s, generator=random).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segment_attention_equals_eager_attention(window, kv_heads, dtype):
    eager, ours = inputs(kv_heads, dtype), inputs(kv_heads, dtype)
    shared = {"cu_seq_lens_q": BOUNDS, "max_length_q": 12, "scaling": 0.3, "sliding_window": window}
    wanted, _ = packed_attention(torch.nn.Module(), *eager, None, **shared)
    got = segment_attention(*ours, BOUNDS, 0.3, window)[0].transpose(1, 2)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (wanted * weights).sum().backward()
    (got * weights).sum().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=2 * tolerance)
