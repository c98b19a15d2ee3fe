"""Speed and accuracy of output heads on one GPU: ours, torch's, liger's and cut-cross-entropy.

    python benchmarks/gpu/lm_head.py --json head.json
    python benchmarks/gpu/lm_head.py --device cpu --tokens 64 --vocabulary 300 --hidden 32 --repeats 1   # a trial

Measures log-probabilities of given tokens, forward and backward with one gradient per token, for states and weight.
Missing packages (`pip install liger-kernel cut-cross-entropy`) and functions (`F.linear_cross_entropy`, from torch
2.13) are skipped. The limit is the time of the three matrix products at the device's peak. Errors are against float32
from the same half-precision inputs: maximum for log-probabilities (the trainer requires 1e-3), relative for gradients.
Only ours computes the entropy and supports sampling masks.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.trainer.model import lm_head
from prime_rl.trainer.trainer_metrics import peak_flops

GIB = 1024**3

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
_COMPILED: Any = lm_head._compile


def ours(chunk: int | None, compiled: bool = True) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        temperature = torch.ones(len(hidden), device=hidden.device)
        lm_head._compile = _COMPILED if compiled else lambda function: function  # until the next call
        return lm_head.token_logprobs(hidden, weight, targets, temperature, chunk)[0]

    return head


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]


def of_torch() -> Head:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("F.linear_cross_entropy is not in this torch")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, targets: (
        -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)
    )


def of_liger() -> Head:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return lambda hidden, weight, targets: -loss(weight, hidden, targets)


def of_cut(impl: str) -> Head:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, targets: (
        -linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl).float()
    )


HEADS: dict[str, Callable[[], Head]] = {
    "ours": lambda: ours(None),
    "ours, 1024 tokens a chunk": lambda: ours(1024),
    "ours, 4096 tokens a chunk": lambda: ours(4096),
    "ours, not compiled": lambda: ours(None, compiled=False),
    "naive": lambda: naive,
    "torch, chunked": of_torch,
    "liger": of_liger,
    "cut-cross-entropy": lambda: of_cut("cce"),
    "cut-cross-entropy, exact": lambda: of_cut("cce_exact"),
}


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    inputs = make_inputs(arguments, device)
    exact = reference(*inputs)
    flops = 6 * arguments.tokens * arguments.vocabulary * arguments.hidden
    limit = flops / peak_flops(device, inputs[0].dtype)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    shape = f"{arguments.tokens:,} tokens, vocabulary {arguments.vocabulary:,}, hidden {arguments.hidden}"
    print(f"{shape}, {arguments.dtype}")
    print(f"{name}, torch {torch.__version__}; limit {limit * 1e3:.1f} ms")
    print(f"{'':28}{'time':>10}{'peak':>10}{'logprobs':>10}{'states':>10}{'weight':>10}")
    results: dict[str, Any] = {}
    for label, build in HEADS.items():
        try:
            results[label] = got = measure(build(), inputs, exact, arguments.repeats)
        except (ImportError, RuntimeError) as error:  # not installed; out of memory, or no such kernel
            print(f"{label:28}{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}")
            results[label] = None
            continue
        memory = "-" if got["peak_gib"] is None else f"{got['peak_gib']:.2f} GiB"
        print(f"{label:28}{got['seconds'] * 1e3:7.1f} ms{memory:>10}", end="")
        print("".join(f"{got[key]:10.1e}" for key in ("logprob_error", "hidden_error", "weight_error")), flush=True)
    if arguments.json:
        report = {"device": name, "torch": torch.__version__, "limit_seconds": limit, "heads": results}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def make_inputs(arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw states, weight, tokens and gradients; logits have a standard deviation of 3."""
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    hidden = torch.randn(arguments.tokens, arguments.hidden, device=device).to(dtype)
    weight = (torch.randn(arguments.vocabulary, arguments.hidden, device=device) * 3 / arguments.hidden**0.5).to(dtype)
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,), device=device)
    return hidden, weight, targets, torch.randn(arguments.tokens, device=device)


def run(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities and the gradients of states and weight."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logprobs = head(hidden, weight, targets)
    logprobs.backward(slopes.to(logprobs.dtype))
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), hidden.grad, weight.grad


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
    """Compute the same in float32 with plain autograd over 512 tokens at a time."""
    hidden, weight = hidden.float(), weight.float().requires_grad_()
    parts, grads = [], []
    for begin in range(0, len(hidden), 512):
        part = slice(begin, begin + 512)
        states = hidden[part].requires_grad_()
        logprobs = naive(states, weight, targets[part])
        logprobs.backward(slopes[part])
        assert states.grad is not None
        parts.append(logprobs.detach())
        grads.append(states.grad)
    assert weight.grad is not None
    return torch.cat(parts), torch.cat(grads), weight.grad


def measure(head: Head, inputs: tuple[Tensor, ...], exact: tuple[Tensor, ...], repeats: int) -> dict[str, Any]:
    cuda = inputs[0].is_cuda
    got = run(head, *inputs)  # compiles as well
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(got[1:], exact[1:], strict=True)]
    logprob_error = float((got[0].float() - exact[0]).abs().max())
    del got
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run(head, *inputs)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(seconds),
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB if cuda else None,
        "logprob_error": logprob_error,
        "hidden_error": errors[0],
        "weight_error": errors[1],
    }


if __name__ == "__main__":
    main()
