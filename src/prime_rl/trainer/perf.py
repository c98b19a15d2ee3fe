"""Model FLOPs of a batch and the peak of the device: what MFU is the quotient of."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
    """FLOPs of forward and backward (three times forward; recomputation does not count).

    Attributes:
        body: per token in the blocks' matrices.
        head: per token that meets the output embedding: the trained ones only.
        attention: per token and token of its segment before it, counted causally.
    """

    body: float
    head: float
    attention: float

    @classmethod
    def of(cls, policy: PolicyModel) -> "ModelFlops":
        """Count the parameters; call it before or after sharding."""
        config = policy.causal_lm.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        active = getattr(config, "num_experts_per_tok", None) or 1
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        matrices = 0.0
        for block in policy.blocks:
            for name, parameter in block.named_parameters():
                share = active / experts if ".experts." in f".{name}." else 1.0
                matrices += share * parameter.numel() if parameter.ndim >= 2 else 0.0
        head = policy.causal_lm.get_output_embeddings().weight.numel()
        return cls(body=6 * matrices, head=6 * head, attention=12 * config.num_hidden_layers * heads * width)

    def total(self, lengths: NDArray[np.integer], scored: int) -> float:
        """FLOPs of segments of `lengths` of which `scored` tokens are trained."""
        tokens = lengths.astype(np.float64)
        return float(self.body * tokens.sum() + self.head * scored + self.attention * (tokens**2).sum() / 2)


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
