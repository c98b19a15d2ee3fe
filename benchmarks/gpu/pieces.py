"""Cost of the pieces of a step on one device, with Qwen3-0.6B's shape and one row of 16,384 tokens:

    python benchmarks/gpu/pieces.py --json FILE
    python benchmarks/gpu/pieces.py --device cpu --tokens 128 --vocabulary 512 --parameters 100000 --side 256

matrix product   the roof: a square product in bfloat16, TFLOP/s
attention        forward and backward of one sequence with each kernel, TFLOP/s (causal; backward counted 2.5 x)
head             log-probabilities and entropies of all tokens, forward and backward, ms
AdamW            the fused update of 0.6 B float32 parameters, GB/s
to the host      pinned copy of a version's bytes in bfloat16, GB/s

Run it first: it takes a minute and shows the fastest attention kernel for `model.attn`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from prime_rl.trainer.model import varlen_attention
from prime_rl.trainer.model.lm_head import token_logprobs

HEADS, KV_HEADS, WIDTH, HIDDEN = 16, 8, 128, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--parameters", type=int, default=596_049_920)
    parser.add_argument("--side", type=int, default=8192, help="of the square product")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    figures: dict[str, float | str] = {"matrix product TFLOP/s": roof(device, arguments.side, arguments.repeats)}
    figures |= attend(device, arguments.tokens, arguments.repeats)
    figures["head ms"] = head(device, arguments.tokens, arguments.vocabulary, arguments.repeats)
    figures["AdamW GB/s"] = adamw(device, arguments.parameters, arguments.repeats)
    figures["to the host GB/s"] = to_host(device, arguments.parameters, arguments.repeats)
    for name, value in figures.items():
        print(f"{name:50} {value if isinstance(value, str) else f'{value:12,.1f}'}")
    if arguments.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        arguments.json.write_text(json.dumps({"device": name, "torch": torch.__version__, **figures}, indent=1) + "\n")


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return seconds per call, after a warm-up call."""
    work()
    _finish(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    _finish(device)
    return (time.perf_counter() - begin) / repeats


def roof(device: torch.device, side: int, repeats: int) -> float:
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return 2 * side**3 / timed(lambda: a @ a, device, repeats) / 1e12


def attend(device: torch.device, tokens: int, repeats: int) -> dict[str, float | str]:
    """Measure each kernel as `packed_attention` calls it; return the error of unsupported kernels."""
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    module = torch.nn.Module()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention.packed_attention(module, q, k, v, None, cu_seq_lens_q=bounds, max_length_q=tokens)[0]

    def torchs(backend: SDPBackend) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    kernels: dict[str, Callable[..., Tensor]] = {
        "varlen": ours,
        "cudnn": torchs(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": torchs(SDPBackend.FLASH_ATTENTION),
    }
    flops = 4 * HEADS * WIDTH * tokens**2 / 2
    figures: dict[str, float | str] = {}
    for name, kernel in kernels.items():
        q, k, v = (_draw(device, heads, tokens) for heads in (HEADS, KV_HEADS, KV_HEADS))
        try:
            forward = timed(lambda kernel=kernel, q=q, k=k, v=v: kernel(q, k, v), device, repeats)
            out = kernel(q, k, v)
            grad = torch.randn_like(out)
            backward = timed(lambda out=out, grad=grad: out.backward(grad, retain_graph=True), device, repeats)
        except (RuntimeError, NotImplementedError) as error:  # the kernel does not support this device
            figures[f"attention {name}"] = str(error).splitlines()[0][:80]
            continue
        figures[f"attention {name} forward TFLOP/s"] = flops / forward / 1e12
        figures[f"attention {name} backward TFLOP/s"] = 2.5 * flops / backward / 1e12
    return figures


def head(device: torch.device, tokens: int, vocabulary: int, repeats: int) -> float:
    hidden = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    temperature = torch.ones(tokens, device=device)
    work = lambda: token_logprobs(hidden, weight, targets, temperature)[0].sum().backward()  # noqa: E731
    return 1e3 * timed(work, device, max(1, repeats // 5))


def adamw(device: torch.device, parameters: int, repeats: int) -> float:
    weight = torch.nn.Parameter(torch.zeros(parameters, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 7 * 4 * parameters / timed(optimizer.step, device, repeats) / 1e9  # reads four, writes three


def to_host(device: torch.device, parameters: int, repeats: int) -> float:
    source = torch.zeros(parameters, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source, device="cpu", pin_memory=device.type == "cuda")
    return 2 * parameters / timed(lambda: target.copy_(source, non_blocking=True), device, repeats) / 1e9


def _draw(device: torch.device, heads: int, tokens: int) -> Tensor:
    """Return [1, heads, tokens, width] with the memory layout of a projection: token by token."""
    drawn = torch.randn(1, tokens, heads, WIDTH, device=device, dtype=torch.bfloat16)
    return drawn.transpose(1, 2).requires_grad_()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
