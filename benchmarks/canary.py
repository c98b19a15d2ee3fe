"""Number of tokens that a canary needs to detect a wrong version and to accept a right one.

    uv run --extra cpu python benchmarks/canary.py --json FILE               # the small model of reverse_text
    uv run --extra cpu python benchmarks/canary.py --model DIRECTORY

stale     one tensor has the values of the previous version, as if a packed copy was not updated. Versions differ by a
          step of Adam at the given rates
swapped   two tensors of equal shape are exchanged
detected  fraction of these errors that a canary of this many tokens detects: in float32 by a log-probability that is
          off by more than 1e-4, in bfloat16 by a mean difference above 0.05 (without rounding)
rounding  mean difference between forward passes in bfloat16 and float32, maximum over 100 canaries of other tokens:
          above 0.05 a right version would be refused
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from publication import SimulatedAdam
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_rl.storage.weights.canary import PolicyCanary

LENGTHS = (4, 8, 16, 32, 64)
RATES = (1e-6, 1e-5, 1e-4)
CANARIES = 100
MODEL = Path(__file__).resolve().parents[1] / "configs/reverse_text/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.model)
    print(f"{'':42}" + "".join(f"{length:>9}" for length in LENGTHS))
    for name, values in figures.items():
        print(f"{name:42}" + "".join(f"{values[str(length)]:9.4g}" for length in LENGTHS))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


@torch.no_grad()
def measure(directory: Path) -> dict[str, dict[str, float]]:
    """Return figures by name and number of tokens."""
    exact, half = (AutoModelForCausalLM.from_pretrained(directory, dtype=d) for d in (torch.float32, torch.bfloat16))
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(CANARIES):
        tokens = draw(exact, seed)
        gaps = (score(exact, tokens) - score(half, tokens)).abs()
        for length in LENGTHS:
            found["rounding"][str(length)].append(float(gaps[: length - 1].mean()))
    tokens = draw(exact, exact.config.vocab_size)
    for name, mistake in mistakes(exact):
        right = score(exact, tokens)
        with mistake:
            wrong = score(exact, tokens)
        for length in LENGTHS:
            for dtype in ("float32", "bfloat16"):
                canary = PolicyCanary((), tuple(right[: length - 1].tolist()), dtype)
                detected = not canary.compare(wrong.tolist(), dtype).passes
                found[f"detected, {name}, {dtype}"][str(length)].append(float(detected))
    return {
        name: {length: max(all_) if name == "rounding" else float(np.mean(all_)) for length, all_ in values.items()}
        for name, values in found.items()
    }


def draw(model: Any, seed: int) -> Tensor:
    """Draw the tokens of a canary as the trainer does."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, model.config.vocab_size, max(LENGTHS)))


def score(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token except the first."""
    logprobs = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


def mistakes(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield kinds of errors, each with a context in which the model has the error."""
    parameters = dict(model.named_parameters())
    updates = SimulatedAdam(parameters.values())
    for rate in RATES:
        before = {name: parameter.clone() for name, parameter in parameters.items()}
        updates.rate = rate
        updates.step()
        for name, parameter in parameters.items():
            yield f"stale at rate {rate:g}", replaced([(parameter, before[name])])
    shapes = defaultdict(list)
    for parameter in parameters.values():
        if not (parameter == parameter.flatten()[0]).all():  # an untrained norm
            shapes[parameter.shape].append(parameter)
    for alike in shapes.values():
        for one, other in combinations(alike, 2):
            yield "swapped", replaced([(one, other.clone()), (other, one.clone())])


@contextmanager
def replaced(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Replace the values of parameters while the context lasts."""
    kept = [parameter.clone() for parameter, _ in pairs]
    for parameter, value in pairs:
        parameter.copy_(value)
    yield
    for (parameter, _), value in zip(pairs, kept, strict=True):
        parameter.copy_(value)


if __name__ == "__main__":
    main()
