"""The attention operator of compiled blocks on a CPU equals eager attention (I8)."""

import pytest
import torch

from prime_rl.trainer.attention.varlen_attention import packed_attention, segment_attention

BOUNDS = torch.tensor([0, 4, 5, 17], dtype=torch.int32)


def inputs(heads=4, kv_heads=2, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    shapes = ((1, heads, 17, 16), (1, kv_heads, 17, 16), (1, kv_heads, 17, 16))
    return [torch.randn(s, generator=random).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segment_attention_equals_eager_attention(window, kv_heads, dtype):
    eager, ours = inputs(kv_heads=kv_heads, dtype=dtype), inputs(kv_heads=kv_heads, dtype=dtype)
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


def test_segment_attention_passes_torchs_operator_checks():
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(segment_attention, (*inputs(), BOUNDS, 0.3, 3), test_utils=tests)
