"""cuDNN's attention for rows that are one long segment, where attention is most of the work.

torch's kernel for segments is FlashAttention-2, which was made for the generation of GPUs before Hopper; cuDNN's is
made for Hopper and later, and takes whole sequences. **Untried: no GPU has run this yet**, so it is used only after it
has given on this device, forward and backward, what torch's own gives. `model.attn='varlen'` never uses it.
"""

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LEAST_TOKENS = 4096
"""Shorter rows cost little, and cuDNN plans for every new length."""
_HOPPER = (9, 0)
_TOLERANCE = 2e-2


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention over one sequence.

    Args:
        query: [1, heads, T, D] in half precision; key and value: [1, kv_heads, T, D].
        scale: factor on the scores; 1/sqrt(D) if None.

    Returns:
        [1, heads, T, D].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # What `scaled_dot_product_attention` calls; by name, because its choice of a kernel is no part of a graph.
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )[0]
    return out


def works_here() -> bool:
    """Whether this device has the kernel, and it agrees with torch's own in outputs and gradients."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _HOPPER:
        return False
    shape = (1, 2, 256, 128)
    random = torch.Generator(device="cuda").manual_seed(0)
    one = [torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    two = [x.clone().requires_grad_() for x in one]
    one = [x.requires_grad_() for x in one]
    try:
        got = attend(one[0], one[1], one[2], None)
        got.sum().backward()
    except RuntimeError as error:  # however torch says that cuDNN lacks it
        logger.info(f"no attention by cuDNN: {str(error).splitlines()[0]}")
        return False
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = F.scaled_dot_product_attention(two[0], two[1], two[2], is_causal=True)
        wanted.sum().backward()
    pairs = [(got, wanted), *((a.grad, b.grad) for a, b in zip(one, two, strict=True))]
    far = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs if a is not None and b is not None)
    if not far <= _TOLERANCE:
        logger.warning(f"attention by cuDNN is off by {far:.2g} here and is not used")
    return far <= _TOLERANCE
