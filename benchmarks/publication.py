"""Cost of publishing a version for the trainer, and its duration.

    uv run python benchmarks/publication.py --json FILE                          # 0.6B parameters, 1.19 GB in bfloat16
    uv run python benchmarks/publication.py --directory /dev/shm                 # directory of the versions

One process on a CPU with one thread: random float32 weights of Qwen3-0.6B's shapes, published in bfloat16 by the
trainer's code. A step consists of matrix products for about a second, in place of forward and backward, and an update
like Adam's. Every round also measures the limits in the same process, memory and folder.

stall           seconds that the main thread waited for the publication: in its start, and before the update
writing         seconds from the start of a publication to its rename
stall_fraction  stall / writing, medians over the rounds; the goal is at most 0.05
no_canary       the same with `weight_broadcast.canary=false`
canary_in_step  the same if the policy scores the canary, as with several ranks, not its copy in a thread
at_once         the same without a canary and with an immediate update, without forward and backward pass
slowed          slowdown of the products during the writing of a version, which shares cores and memory
memcpy, cast    copying the published bytes; rounding the float32 weights to bfloat16: the minimum of a snapshot
disk            writing and syncing one file of equal size in the same folder
canary          scoring 64 tokens with the policy, and with its unsharded copy
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import delta
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import World, join_world
from prime_rl.trainer.weight_sync.publisher import Publisher, canary_row, measure_canary, unsharded_copy
from prime_rl.trainer.weights.policy_loading import make_policy

GOAL = 0.05
STEP_SECONDS = 1.5
_SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
_SHAPE = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
_POOL = 2**22
_SHARE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="directory of the versions")
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
    """Publish `rounds` versions in each mode, in a temporary folder of `directory`."""
    with lone_trainer(small) as made, tempfile.TemporaryDirectory(dir=directory) as folder:
        return _rounds(made, Path(folder), rounds, 0.2 if small else STEP_SECONDS)


def _rounds(trainer: "Trainer", folder: Path, rounds: int, step_seconds: float) -> dict[str, Any]:
    work, limits = Work(step_seconds), Limits(trainer.policy, folder)
    target, version, rate = folder / "step_1", PolicyVersion(0, 1), trainer.updates.rate_of(_SHARE)
    modes = {
        "default": (trainer.publisher, work),
        "no_canary": (trainer.new_publisher(canary=None), work),
        "canary_in_step": (trainer.new_publisher(canary_model=lambda: None), work),
        "at_once": (trainer.new_publisher(canary=None), lambda: None),
    }
    for publisher, _ in modes.values():  # the first version of each also allocates memory
        trainer.publish(target, version, lambda: None, rate, publisher)
        shutil.rmtree(target)
    row, canary_model = canary_row(trainer.policy.vocabulary), trainer.canary_model()
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        measured = {"step_alone_s": timed(work)}
        for mode, (publisher, meanwhile) in modes.items():
            seconds = trainer.publish(target, version, meanwhile, rate, publisher)
            shutil.rmtree(target)
            measured |= {f"{mode}_{name}": value for name, value in seconds.items()}
        measured |= {
            "canary_s": timed(lambda: measure_canary(trainer.policy, row)()),
            "unsharded_canary_s": timed(lambda: measure_canary(canary_model, row)()),
            **limits.measure(),
        }
        for name, value in measured.items():
            times.setdefault(name, []).append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    fractions = {mode: median[f"{mode}_stall_s"] / median[f"{mode}_writing_s"] for mode in modes}
    return {
        "stall_fraction": fractions.pop("default"),
        "goal": GOAL,
        "goal_reached": median["default_stall_s"] <= GOAL * median["default_writing_s"],
        **{f"stall_fraction_{mode}": fraction for mode, fraction in fractions.items()},
        "bytes": trainer.bytes,
        "gigabytes": trainer.bytes / 1e9,
        **median,
        "stall_over_memcpy": median["default_stall_s"] / median["memcpy_s"],
        "stall_at_once_over_cast": median["at_once_stall_s"] / median["cast_s"],
        "writing_over_disk": median["default_writing_s"] / median["disk_s"],
        "slowed": median["default_step_s"] / median["step_alone_s"],
        "rounds": times,
        "directory": str(folder.parent),
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Return machine, versions and date of the figures."""
    return {
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextmanager
def lone_trainer(small: bool) -> Iterator["Trainer"]:
    """Run a `Trainer` in a world of size 1 while the context lasts."""
    torch.set_num_threads(1)  # like the trainer on a CPU, which it shares with the sampler
    with join_world("cpu", 600) as world:
        yield Trainer(world, small)


class Trainer:
    """A policy with random weights, sharded like the trainer's, and its publisher.

    Attributes:
        policy: the policy in float32.
        publisher: publisher in bfloat16 with the defaults of `rl`.
        updates: retargets the optimizer.
        bytes: bytes of the published tensors.
    """

    def __init__(self, world: World, small: bool) -> None:
        self._world = world
        with tempfile.TemporaryDirectory() as directory:
            self._config, self._tokenizer = _write_model(Path(directory), small)
            self.policy = make_policy(self._config, 0, world)
            # Created now, because its configuration is deleted with the directory.
            self._canary_model = unsharded_copy(self.policy, self._config, world, torch.float32)
        self.updates = SimulatedAdam(self.policy.parameters())
        self.bytes = sum(parameter.numel() * 2 for parameter in self.policy.parameters())
        self.publisher = self.new_publisher()

    def canary_model(self) -> PolicyModel | None:
        """Return the model that scores the canary in a thread."""
        return self._canary_model

    def new_publisher(self, **options: Any) -> Publisher:
        """Create another publisher; updates wait for its copies."""
        options = {"canary": torch.float32, "canary_model": self.canary_model} | options
        publisher = Publisher(self.policy, self._tokenizer, torch.bfloat16, self._world, **options)
        publisher.guard(self.updates)
        return publisher

    def rebuild(self, **options: Any) -> None:
        """Free all publishers and create another one."""
        del self.publisher, self.updates
        self.updates = SimulatedAdam(self.policy.parameters())
        self.publisher = self.new_publisher(**options)

    def publish(
        self,
        target: Path,
        version: PolicyVersion,
        work: Callable[[], object],
        rate: float,
        publisher: Publisher | None = None,
    ) -> dict[str, float]:
        """Start a version, run `work`, update the weights at `rate`, and wait for the version.

        Returns:
            stall_s: time of this thread in the start of the publication and before the update. copy_wait_s: the latter
            alone. step_seconds: the work. writing_s: from the start to the rename.
        """
        publisher = publisher or self.publisher
        start = timed(lambda: publisher.start(target, version))
        step = timed(work)
        self.updates.rate = rate
        self.updates.step()
        publisher.wait()
        metrics = publisher.metrics()
        return {
            "stall_s": start + metrics["weight_sync/copy_wait"],
            "copy_wait_s": metrics["weight_sync/copy_wait"],
            "step_s": step,
            "writing_s": metrics["weight_sync/seconds"],
        }


class SimulatedAdam(torch.optim.Optimizer):
    """Moves every weight like the last of a few steps of Adam with noisy gradients.

    Attributes:
        rate: the learning rate.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.rate = 0.0
        self._random = np.random.default_rng(0)
        _, before, after = delta.adam_tensor(self._random, (_POOL,))
        self._steps = torch.from_numpy(np.tile(after - before, 2))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move all weights; each gets one of the simulated steps at random."""
        for group in self.param_groups:
            for parameter in group["params"]:
                flat = local(parameter).view(-1)
                for part in flat.split(_POOL):
                    begin = int(self._random.integers(_POOL))
                    part.add_(self._steps[begin : begin + len(part)], alpha=self.rate)

    def rate_of(self, share: float) -> float:
        """Return the rate at which a step changes `share` of the weights in bfloat16."""
        largest = max((p for group in self.param_groups for p in group["params"]), key=lambda p: p.numel())
        weights = local(largest.detach()).view(-1)[: 2**20].numpy()
        steps = self._steps[: len(weights)].numpy()
        low, high = np.float32(1e-9), np.float32(1e-2)
        for _ in range(25):
            rate = np.sqrt(low) * np.sqrt(high)
            changed = (delta.bfloat16(weights) != delta.bfloat16(weights + rate * steps)).mean()
            low, high = (low, rate) if changed > share else (rate, high)
        return float(rate)


class Work:
    """A fixed number of matrix products that take about `seconds` on this machine."""

    def __init__(self, seconds: float) -> None:
        self._left, self._right = torch.rand(2, 512, 512).unbind()
        self._count = 1
        alone = min(timed(self) for _ in range(20))
        self._count = max(1, round(seconds / alone))

    def __call__(self) -> None:
        """Compute the products."""
        for _ in range(self._count):
            self._left @ self._right


class Limits:
    """Measures memory and disk with the bytes of one version; frees its memory afterwards."""

    def __init__(self, policy: PolicyModel, folder: Path) -> None:
        self._weights = [local(parameter.detach()) for parameter in policy.parameters()]
        self._file = folder / "limit"

    def measure(self) -> dict[str, float]:
        """Return seconds: memcpy_seconds, cast_s and disk_seconds."""
        halves = [weight.bfloat16() for weight in self._weights]
        targets = [half.clone() for half in halves]  # allocated before the measurement
        times = {
            "memcpy_s": timed(lambda: _copy(halves, targets)),
            "cast_s": timed(lambda: _copy(self._weights, targets)),
        }
        targets.clear()
        times["disk_s"] = timed(lambda: self._write(halves))
        self._file.unlink()
        return times

    def _write(self, halves: list[torch.Tensor]) -> None:
        with self._file.open("wb") as file:
            for half in halves:
                file.write(half.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def timed(work: Callable[[], object]) -> float:
    """Return the duration of `work`, seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _write_model(directory: Path, small: bool) -> tuple[TrainerModelConfig, Any]:
    """Write configuration and tokenizer of a model with random weights."""
    shape = _SMALL if small else _SHAPE
    config = transformers.Qwen3Config(
        **shape,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    words = {"<|endoftext|>": 0, **{f"word{i}": i for i in range(1, shape["vocab_size"])}}
    core = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return TrainerModelConfig(name=str(directory), debug={"random_init": True}), tokenizer


if __name__ == "__main__":
    main()
