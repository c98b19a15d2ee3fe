"""Attention by matrix products against the kernel of torch, in float64."""

import pytest
import torch
import torch.nn.functional as F

from prime_rl.trainer.half_attention import attend


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_equals_the_kernel(dtype, tolerance, length, window):
    generator = torch.Generator().manual_seed(length)
    shapes = (4, length, 8), (2, length, 8), (2, length, 6)
    inputs = [torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes]
    grad = torch.randn(1, 4, length, 6, generator=generator).to(dtype)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    mask = None if window is None else seen.triu(1 - window)

    def run(attention, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attention(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    def exact(*inputs):
        return F.scaled_dot_product_attention(
            *inputs, attn_mask=seen if mask is None else mask, scale=0.3, enable_gqa=True
        )

    got = run(lambda *inputs: attend(*inputs, mask, 0.3), dtype)
    for a, b in zip(got, run(exact, torch.float64), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spread", [1, 3, 6])
def test_it_is_as_exact_as_the_kernel_of_torch_in_halves(spread):
    """Also where scores are large, up to about 30 here, and halves are far apart."""
    generator = torch.Generator().manual_seed(spread)
    query, key, value = (torch.randn(1, 4, 150, 64, generator=generator).bfloat16() for _ in range(3))
    query, key = query * spread**0.5, key * spread**0.5
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    ours, theirs = (
        (attended.double() - exact).abs().mean()
        for attended in (
            attend(query, key, value, None, None),
            F.scaled_dot_product_attention(query, key, value, is_causal=True),
        )
    )
    assert ours < 1.5 * theirs


def test_scale_is_that_of_the_head_dimension():
    query, key, value = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attend(query, key, value, None, None), expected)
