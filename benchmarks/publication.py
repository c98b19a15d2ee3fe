"""What does publishing a version cost the trainer, and how long until it is there?

    uv run python benchmarks/publication.py --json FILE                          # 0.6B parameters, 1.19 GB in bfloat16
    uv run python benchmarks/publication.py --directory /dev/shm                 # where versions are written

One process on a CPU, one thread: float32 weights of Qwen3-0.6B's shapes, random, published in bfloat16 by the trainer's
own code. A step is a second or so of matrix products, which stand for forward and backward, and an update as Adam would
make it. In every round the limits are measured too, beside nothing else, in the same process on the same memory and
folder.

stall           seconds that the main thread waited for the publication: in its start, and before the update
writing         seconds from the start of a publication to the rename that commits it
stall_fraction  stall / writing, medians over the rounds; the goal is 0.05 at most
no_canary       the same with `weight_broadcast.canary=false`
canary_in_step  the same where the policy itself scores the canary, as several ranks do, and not a twin in a thread
at_once         the same without a canary, where the update follows at once: no forward and backward pass in between
slowed          how much longer the products took while a version was written, which shares cores and memory with them
memcpy, cast    copying the published bytes; rounding the float32 weights to bfloat16: what a snapshot cannot do without
disk            writing and syncing as many bytes to one file of the same folder
canary          scoring 64 tokens by the policy, and by its twin
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

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.parallel import World, join_world
from prime_rl.trainer.publication import Publisher, plain_twin
from prime_rl.trainer.publication.canary import canary_row, measure_canary
from prime_rl.types import PolicyVersion

GOAL = 0.05
STEP_S = 1.5
_SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
_SHAPE = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
_POOL = 2**22
_SHARE = 0.02


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
    """Publish `rounds` versions each way into a folder of its own in `directory`, which is removed."""
    with lone_trainer(small) as made, tempfile.TemporaryDirectory(dir=directory) as folder:
        return _rounds(made, Path(folder), rounds, 0.2 if small else STEP_S)


def _rounds(trainer: "Trainer", folder: Path, rounds: int, step_s: float) -> dict[str, Any]:
    work, limits = Work(step_s), Limits(trainer.policy, folder)
    target, version, rate = folder / "step_1", PolicyVersion(0, 1), trainer.updates.rate_of(_SHARE)
    ways = {
        "default": (trainer.publisher, work),
        "no_canary": (trainer.new_publisher(canary=None), work),
        "canary_in_step": (trainer.new_publisher(twin=lambda: None), work),
        "at_once": (trainer.new_publisher(canary=None), lambda: None),
    }
    for publisher, _ in ways.values():  # the first version of each also reserves its memory
        trainer.publish(target, version, lambda: None, rate, publisher)
        shutil.rmtree(target)
    row, twin = canary_row(trainer.policy.vocabulary), trainer.twin()
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        measured = {"step_alone_s": timed(work)}
        for way, (publisher, meanwhile) in ways.items():
            seconds = trainer.publish(target, version, meanwhile, rate, publisher)
            shutil.rmtree(target)
            measured |= {f"{way}_{name}": value for name, value in seconds.items()}
        measured |= {
            "canary_s": timed(lambda: measure_canary(trainer.policy, row)()),
            "twins_canary_s": timed(lambda: measure_canary(twin, row)()),
            **limits.measure(),
        }
        for name, value in measured.items():
            times.setdefault(name, []).append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    fractions = {way: median[f"{way}_stall_s"] / median[f"{way}_writing_s"] for way in ways}
    return {
        "stall_fraction": fractions.pop("default"),
        "goal": GOAL,
        "goal_reached": median["default_stall_s"] <= GOAL * median["default_writing_s"],
        **{f"stall_fraction_{way}": fraction for way, fraction in fractions.items()},
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
    """Say what the figures were measured on, and when."""
    return {
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextmanager
def lone_trainer(small: bool) -> Iterator["Trainer"]:
    """Make a `Trainer` in a world of one, which ends with the context."""
    torch.set_num_threads(1)  # as the trainer does it on a CPU, which it shares with the sampler
    with join_world("cpu", 600) as world:
        yield Trainer(world, small)


class Trainer:
    """A policy of random weights, sharded as the trainer does it, and the publisher of its versions.

    Attributes:
        policy: float32.
        publisher: in bfloat16, with what `rl` has by default.
        updates: in place of an optimizer.
        bytes: of the published tensors.
    """

    def __init__(self, world: World, small: bool) -> None:
        self._world = world
        with tempfile.TemporaryDirectory() as directory:
            self._config, self._tokenizer = _write_model(Path(directory), small)
            self.policy = make_policy(self._config, 0, world)
            self._twin = plain_twin(self.policy, self._config, world, torch.float32)  # while its configuration is there
        self.updates = SimulatedAdam(self.policy.parameters())
        self.bytes = sum(parameter.numel() * 2 for parameter in self.policy.parameters())
        self.publisher = self.new_publisher()

    def twin(self) -> PolicyModel | None:
        """Return what scores the canary in a thread."""
        return self._twin

    def new_publisher(self, **options: Any) -> Publisher:
        """Make another publisher; its updates wait for its copies."""
        options = {"canary": torch.float32, "twin": self.twin} | options
        publisher = Publisher(self.policy, self._tokenizer, torch.bfloat16, self._world, **options)
        publisher.guard(self.updates)
        return publisher

    def rebuild(self, **options: Any) -> None:
        """Let go of all publishers and their memory, and make another one."""
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
        """Start a version, work, update the weights at `rate`, and wait until the version is there.

        Returns:
            stall_s: what the publication took of this thread, in its start and before the update. copy_wait_s: the
            latter alone. step_s: the work. writing_s: from the start to the rename.
        """
        publisher = publisher or self.publisher
        start = timed(lambda: publisher.start(target, version))
        step = timed(work)
        self.updates.rate = rate
        self.updates.step()
        publisher.wait()
        metrics = publisher.metrics()
        return {
            "stall_s": start + metrics["publish/copy_wait"],
            "copy_wait_s": metrics["publish/copy_wait"],
            "step_s": step,
            "writing_s": metrics["publish/seconds"],
        }


class SimulatedAdam(torch.optim.Optimizer):
    """Moves every weight as the last of a few steps of Adam with noisy gradients would.

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
        """Move all weights; which weight makes which of the simulated steps is drawn anew."""
        for group in self.param_groups:
            for parameter in group["params"]:
                flat = local(parameter).view(-1)
                for part in flat.split(_POOL):
                    begin = int(self._random.integers(_POOL))
                    part.add_(self._steps[begin : begin + len(part)], alpha=self.rate)

    def rate_of(self, share: float) -> float:
        """Find the rate at which a step changes `share` of the weights when they are rounded to bfloat16."""
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
    """Products of matrices that take about `seconds` on this machine; a fixed number of them."""

    def __init__(self, seconds: float) -> None:
        self._left, self._right = torch.rand(2, 512, 512).unbind()
        self._count = 1
        alone = min(timed(self) for _ in range(20))
        self._count = max(1, round(seconds / alone))

    def __call__(self) -> None:
        """Compute them."""
        for _ in range(self._count):
            self._left @ self._right


class Limits:
    """What the memory and the disk can do with the bytes of one version. Holds memory while it measures only."""

    def __init__(self, policy: PolicyModel, folder: Path) -> None:
        self._weights = [local(parameter.detach()) for parameter in policy.parameters()]
        self._file = folder / "limit"

    def measure(self) -> dict[str, float]:
        """Return seconds: memcpy_s, cast_s and disk_s."""
        halves = [weight.bfloat16() for weight in self._weights]
        places = [half.clone() for half in halves]  # written once: fresh memory costs more than copying
        times = {
            "memcpy_s": timed(lambda: _copy(halves, places)),
            "cast_s": timed(lambda: _copy(self._weights, places)),
        }
        places.clear()
        times["disk_s"] = timed(lambda: self._write(halves))
        self._file.unlink()
        return times

    def _write(self, halves: list[torch.Tensor]) -> None:
        with self._file.open("wb") as file:
            for half in halves:
                file.write(half.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())


def _copy(sources: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    for place, source in zip(places, sources, strict=True):
        place.copy_(source)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _write_model(directory: Path, small: bool) -> tuple[TrainerModelConfig, Any]:
    """Write configuration and tokenizer of a model; its weights will be drawn."""
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
