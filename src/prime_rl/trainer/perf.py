"""Model FLOPs of a batch and the peak of the device: what MFU is the quotient of."""

import resource
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from prime_rl.trainer.model import PolicyModel

# Dense bfloat16 FLOP/s by a part of the device's name, from the vendors' data sheets; first match counts.
_PEAK = {
    "B300": 2.25e15, "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12,
    "4090": 165e12, "MI300X": 1307e12,
}  # fmt: skip
_ROOF_SIZE = 1024
_ROOF_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward; recomputation does not count.

    A matrix costs 2 per element and token in the forward pass and twice that in the backward pass: once for its
    input's gradient and, unless it is frozen, once for its own.

    Attributes:
        body: per token in the blocks' matrices.
        head: per token that meets the output embedding: the trained ones only.
        attention: per token and token of its segment before it, counted causally.
        upstream_body, upstream_attention: as `total_upstream` counts them.
    """

    body: float
    head: float
    attention: float
    upstream_body: float
    upstream_attention: float

    @classmethod
    def of(cls, policy: PolicyModel) -> "ModelFlops":
        """Count the parameters; call it before or after sharding."""
        config = policy.causal_lm.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        active = getattr(config, "num_experts_per_tok", None) or 1
        body = matrices = 0.0
        for block in policy.blocks:
            for name, parameter in block.named_parameters():
                stack = ".experts." in f".{name}." and parameter.ndim == 3  # [experts, out, in]
                share = active / parameter.shape[0] if stack else 1.0
                elements = share * parameter.numel() if parameter.ndim >= 2 and not name.endswith("bias") else 0.0
                matrices += elements
                body += _flops_per_element(parameter) * elements
        head = policy.causal_lm.get_output_embeddings().weight
        return cls(
            body=body,
            head=_flops_per_element(head) * head.numel(),
            attention=12 * config.num_hidden_layers * heads * width,
            upstream_body=6 * (matrices + head.numel()),
            upstream_attention=12 * config.num_hidden_layers * config.hidden_size,
        )

    def total(self, lengths: NDArray[np.integer], scored: int) -> float:
        """FLOPs of segments of `lengths` of which `scored` tokens are trained."""
        tokens = lengths.astype(np.float64)
        return float(self.body * tokens.sum() + self.head * scored + self.attention * (tokens**2).sum() / 2)

    def total_upstream(self, lengths: NDArray[np.integer]) -> float:
        """FLOPs of the same segments as prime-rl upstream counts them for its published MFU, to compare with those.

        All tokens meet the output embedding, attention is counted in full instead of causally, with hidden size for
        heads times head dimension, and nothing is frozen.
        """
        tokens = lengths.astype(np.float64)
        return float(self.upstream_body * tokens.sum() + self.upstream_attention * (tokens**2).sum())


def _flops_per_element(parameter: nn.Parameter) -> int:
    return 6 if parameter.requires_grad else 4


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak of one device in FLOP/s: the data sheet's for a known GPU in bfloat16, else a matrix product timed now."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAK.items():
            if part in name:
                return peak
    return _measured_roof(device, dtype)


def _measured_roof(device: torch.device, dtype: torch.dtype) -> float:
    """Best of a few square matrix products, with as many threads as training will use."""
    a = torch.ones(_ROOF_SIZE, _ROOF_SIZE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_ROOF_REPEATS):
        _finish(device)
        begin = time.perf_counter()
        a @ a
        _finish(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * _ROOF_SIZE**3 / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: what torch held on a GPU, the resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
