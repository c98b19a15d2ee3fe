"""Model FLOPs of a batch and peak FLOP/s of the device, whose ratio is MFU."""

import resource
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from prime_rl.trainer.model.policy_model import PolicyModel

# Dense bfloat16 FLOP/s by a part of the device's name, from the vendors' data sheets; first match counts.
_PEAK = {
    "B300": 2.25e15, "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12,
    "4090": 165e12, "MI300X": 1307e12,
}  # fmt: skip
_MATMUL_SIZE = 1024
_MATMUL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward, without recomputation.

    A matrix costs 2 FLOPs per element and token in the forward pass, 2 for the gradient of its input, and unless it is
    frozen 2 for its own gradient.
    """

    body: float  # per token in the blocks' matrices
    head: float  # per trained token; only these meet the output embedding
    attention: float  # per pair of a token and an earlier token of its segment (causal)
    # as `total_upstream` counts them
    upstream_body: float
    upstream_attention: float

    @classmethod
    def of(cls, policy: PolicyModel) -> "ModelFlops":
        """Count the parameters, before or after sharding."""
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
                body += (6 if parameter.requires_grad else 4) * elements
        head = policy.causal_lm.get_output_embeddings().weight
        return cls(
            body=body,
            head=(6 if head.requires_grad else 4) * head.numel(),
            attention=12 * config.num_hidden_layers * heads * width,
            upstream_body=6 * (matrices + head.numel()),
            upstream_attention=12 * config.num_hidden_layers * config.hidden_size,
        )

    def total(self, lengths: NDArray[np.integer], scored: int) -> float:
        """FLOPs of segments of `lengths` of which `scored` tokens are trained."""
        tokens = lengths.astype(np.float64)
        return float(self.body * tokens.sum() + self.head * scored + self.attention * (tokens**2).sum() / 2)

    def total_upstream(self, lengths: NDArray[np.integer]) -> float:
        """FLOPs by the formula of upstream prime-rl, to compare with its published MFU.

        All tokens meet the output embedding, attention is full instead of causal, hidden size replaces heads times head
        dimension, and nothing is frozen.
        """
        tokens = lengths.astype(np.float64)
        return float(self.upstream_body * tokens.sum() + self.upstream_attention * (tokens**2).sum())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one device: from the data sheet for a known GPU in bfloat16, otherwise measured."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAK.items():
            if part in name:
                return peak
    # The best of several square matrix products with the threads of training.
    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, device=device, dtype=dtype)
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    best = float("inf")
    for _ in range(_MATMUL_REPEATS):
        synchronize()
        begin = time.perf_counter()
        a @ a
        synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * _MATMUL_SIZE**3 / best


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated by torch on a GPU, or the resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
