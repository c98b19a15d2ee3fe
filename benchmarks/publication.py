"""What does publishing a version cost the trainer, and how long until it is there?

    uv run python benchmarks/publication.py --json FILE                          # 0.6B parameters, 1.19 GB in bfloat16
    uv run python benchmarks/publication.py --directory /dev/shm                 # where versions are written

One process on a CPU: float32 weights of Qwen3-0.6B's shapes, random, published in bfloat16 by the trainer's own code.
A step is a second or so of matrix products, which stand for forward and backward, and an update. In every round the
limits are measured too, beside nothing else, in the same process on the same memory and folder.

stall           seconds that the main thread waited for the publication: in its start, and before the update
writing         seconds from the start of a publication to the rename that commits it
stall_fraction  stall / writing, medians over the rounds; the goal is 0.05 at most
at_once         the same where the update follows at once, with no forward and backward pass in between
slowed          how much longer the products took while a version was written, which shares cores and memory with them
memcpy, cast    copying the published bytes; rounding the float32 weights to bfloat16: what a snapshot cannot do without
disk            writing and syncing as many bytes to one file of the same folder
canary          the forward pass over 64 tokens whose result goes into the manifest: work of the trainer, no stall;
                `weight_broadcast.canary=false` saves it
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GOAL = 0.05
_MIB = 2**20
_SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
_SHAPE = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="where versions are written"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.directory, arguments.rounds, arguments.small)
    for name, value in figures.items():
        print(f"{name:28} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(directory: Path, rounds: int = 3, small: bool = False) -> dict[str, Any]:
    """Publish `rounds` versions into a folder of its own in `directory`, which is removed."""
    import torch

    from prime_rl.trainer.parallel import join_world

    torch.set_num_threads(1)
    with join_world("cpu", 600) as world, tempfile.TemporaryDirectory(dir=directory) as folder:
        policy, tokenizer = _policy(world, small)
        return _rounds(policy, tokenizer, world, Path(folder), rounds, step_s=0.2 if small else 1.5)


def _rounds(policy: Any, tokenizer: Any, world: Any, folder: Path, rounds: int, step_s: float) -> dict[str, Any]:
    import torch

    from prime_rl.trainer.publication import Publisher
    from prime_rl.trainer.publication.canary import canary_row, measure_canary

    lazy, eager = (Publisher(policy, tokenizer, torch.bfloat16, world) for _ in range(2))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    lazy.guard(optimizer)
    work = _Work(step_s)
    limits = _Limits(policy, folder)
    for publisher in (eager, lazy):  # the first version of each also reserves its memory
        _published(publisher, folder, lambda: None, lambda: None)
    row = canary_row(policy.vocabulary)
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        at_once = _published(eager, folder, lambda: None, optimizer.step)
        overlapped = _published(lazy, folder, work, optimizer.step)
        for name, seconds in {
            **{f"{key}_at_once_s": value for key, value in at_once.items() if key in ("stall", "writing")},
            **{f"{key}_s": value for key, value in overlapped.items() if key != "bytes"},
            "step_alone_s": _timed(work),
            "canary_s": _timed(lambda: measure_canary(policy, row)()),
            **limits.measure(),
        }.items():
            times.setdefault(name, []).append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "stall_fraction": median["stall_s"] / median["writing_s"],
        "goal": GOAL,
        "goal_reached": median["stall_s"] / median["writing_s"] <= GOAL,
        "stall_fraction_at_once": median["stall_at_once_s"] / median["writing_at_once_s"],
        "bytes": overlapped["bytes"],
        "gigabytes": overlapped["bytes"] / 1e9,
        **median,
        "stall_over_memcpy": median["stall_s"] / median["memcpy_s"],
        "stall_at_once_over_cast": median["stall_at_once_s"] / median["cast_s"],
        "writing_over_disk": median["writing_s"] / median["disk_s"],
        "slowed": median["step_s"] / median["step_alone_s"],
        "rounds": times,
        "directory": str(folder.parent),
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _published(
    publisher: Any, folder: Path, work: Callable[[], None], update: Callable[[], object]
) -> dict[str, float]:
    """Start a version, work, update, and wait until it is there."""
    from prime_rl.types import PolicyVersion

    target = folder / "step_1"
    start = _timed(lambda: publisher.start(target, PolicyVersion(0, 1)))
    step = _timed(work)
    update()
    publisher.wait()
    metrics = publisher.metrics()
    shutil.rmtree(target)
    return {
        "stall": start + metrics["publish/copy_wait"] if publisher._guarded else start,
        "step": step,
        "writing": metrics["publish/seconds"],
        "bytes": metrics["publish/bytes"],
    }


class _Work:
    """Products of matrices that take about `seconds` on this machine; a fixed number of them."""

    def __init__(self, seconds: float) -> None:
        import torch

        self._left, self._right = torch.rand(2, 512, 512).unbind()
        self._count = 1
        alone = min(_timed(self) for _ in range(20))
        self._count = max(1, round(seconds / alone))

    def __call__(self) -> None:
        for _ in range(self._count):
            self._left @ self._right


class _Limits:
    """What the memory and the disk can do with the bytes of one version."""

    def __init__(self, policy: Any, folder: Path) -> None:
        import torch

        self._weights = [parameter.detach().to_local() for parameter in policy.parameters()]
        self._from = [torch.zeros_like(weight, dtype=torch.bfloat16) for weight in self._weights]
        self._to = [torch.zeros_like(half) for half in self._from]
        self._file = folder / "limit"

    def measure(self) -> dict[str, float]:
        times = {
            "memcpy_s": _timed(lambda: self._copy(self._from)),
            "cast_s": _timed(lambda: self._copy(self._weights)),
        }
        times["disk_s"] = _timed(self._write)
        self._file.unlink()
        return times

    def _copy(self, sources: list[Any]) -> None:
        for target, source in zip(self._to, sources, strict=True):
            target.copy_(source)

    def _write(self) -> None:
        import torch

        with self._file.open("wb") as file:
            for half in self._from:
                file.write(half.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _policy(world: Any, small: bool) -> tuple[Any, Any]:
    """A policy of random weights, sharded as the trainer does it, and a tokenizer of a few words."""
    import transformers
    from tokenizers import Tokenizer, models

    from prime_rl.configs.trainer import TrainerModelConfig
    from prime_rl.trainer.loading import make_policy

    config = transformers.Qwen3Config(
        **(_SMALL if small else _SHAPE),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    words = models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<|endoftext|>")
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        options = TrainerModelConfig(name=directory, debug={"random_init": True})
        return make_policy(options, 0, world), tokenizer


if __name__ == "__main__":
    main()
