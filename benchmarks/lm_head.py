"""Memory and time of the output head on a CPU: log-probabilities, forward and backward.

    uv run python benchmarks/lm_head.py --json benchmarks/results/lm_head.json

Each case runs in a separate process: 4,096 tokens, vocabulary 151,936, hidden 1024, with the gradient of the weight.
Prints the peak memory over weights and states (limit: the weight's gradient), CPU seconds, and the largest error of
the log-probabilities against float64. `naive` keeps all logits, like a training loop with log_softmax. Needs 12 GiB
and about ten minutes of one core; `--tokens 512` and `--only ours` are faster.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.trainer.model.lm_head import token_logprobs

GIB = 1024**3
CHECKED = 64
"""Tokens whose log-probabilities are compared with float64."""

Head = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all logits at once."""
    logprobs = torch.log_softmax((hidden @ weight.T).float() / temperature[:, None], -1)
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def heads(chunk: int | None) -> dict[str, Head]:
    return {"ours": lambda *inputs: token_logprobs(*inputs, chunk)[:2], "naive": naive}


def main() -> None:
    arguments = parse_arguments()
    if arguments.case:
        print(json.dumps(measure(arguments, *arguments.case)))
        return
    cases = [(name, dtype) for dtype in arguments.dtypes for name in (arguments.only or heads(None))]
    shape = f"{arguments.tokens:,} tokens, vocabulary {arguments.vocabulary:,}, hidden {arguments.hidden}"
    print(f"{shape}, {arguments.threads} thread, torch {torch.__version__}")
    print(f"{'':8}{'':10}{'over weights':>13}{'limit':>10}{'CPU':>9}{'error':>10}")
    results = {}
    for name, dtype in cases:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", name, dtype]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        case = results[f"{name}_{dtype}"] = json.loads(answer.splitlines()[-1])
        print(
            f"{name:8}{dtype:10}{case['memory_gib']:9.2f} GiB{case['limit_gib']:6.2f} GiB{case['cpu_seconds']:7.1f} s"
            f"{case['logprob_error']:10.1e}"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, help="model.logprob_chunk_size; its default if omitted")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", choices=list(heads(None)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace, name: str, dtype: str) -> dict[str, Any]:
    """Run one case in a new process, whose peak memory is that of its weights and states."""
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype)).normal_(generator=generator)

    hidden = normal(arguments.tokens, arguments.hidden).requires_grad_()
    weight = normal(arguments.vocabulary, arguments.hidden).mul_(3 / arguments.hidden**0.5).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=generator)
    temperature, slope = torch.ones(arguments.tokens), torch.randn(arguments.tokens, generator=generator)
    head = heads(arguments.chunk)[name]
    head(hidden[:8].detach(), weight[:64].detach(), targets[:8] % 64, temperature[:8])  # initialises the libraries
    before, start = reset_peak(), time.process_time()
    logprobs, _ = head(hidden, weight, targets, temperature)
    logprobs.backward(slope)
    seconds, after = time.process_time() - start, memory("VmHWM")
    return {
        "memory_gib": (after - before) / GIB,
        "limit_gib": (weight.nbytes + hidden.nbytes) / GIB,
        "cpu_seconds": seconds,
        "logprob_error": error(hidden, weight, targets, logprobs),
    }


@torch.no_grad()
def error(hidden: Tensor, weight: Tensor, targets: Tensor, logprobs: Tensor) -> float:
    """Return the largest difference to float64 over the first tokens."""
    states = hidden[:CHECKED].double()
    logits = torch.cat([states @ part.double().T for part in weight.split(4096)], 1)
    exact = torch.log_softmax(logits, -1).gather(1, targets[:CHECKED, None])[:, 0]
    return float((exact - logprobs[:CHECKED]).abs().max())


def reset_peak() -> int:
    """Reset the peak memory; return the current memory, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) memory of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
