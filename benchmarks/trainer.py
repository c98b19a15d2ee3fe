"""Speed of a packed training step of a 5M-parameter model on a CPU, compared with a plain loop.

    uv run python benchmarks/trainer.py --json benchmarks/results/trainer.json

fraction of the roof   model FLOPs of the step (causal attention, no recomputation) per second, over those of square
                       matrix products of the same dtype, measured before and after each step
speed-up               time of a plain loop of transformers over time of our step, with equal sequences, dtype, threads,
                       loss and optimizer: batches of 32 padded to the longest, an attention mask, logits of all
                       positions. `limit` is the padding ratio, padded tokens / real tokens. `--json` gets the smaller
                       speed-up of the two dtypes.

Our step is `TrainStep.step`: packed rows, forward, loss, backward, clipped AdamW with float32 master weights; in
bfloat16 the plain loop keeps everything in bfloat16, which is less work. Sequences have the lengths of answers of
GSM8K; every token but the first is trained. `--lengths FILE` reads other lengths: integers, or JSON lines whose
`answer` is counted in words, digits and signs. Both kinds of steps alternate, and medians of the ratios of neighbours
are printed. With one thread, CPU time is measured instead of wall time.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.orchestrator.packing import best_fit_decreasing
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World, join_world
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.train_step import Counts, Minibatch, TrainStep
from prime_rl.trainer.trainer_metrics import ModelFlops
from prime_rl.trainer.weights.policy_loading import make_policy

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
PERCENTS = [0, 1, 2.5, *range(5, 96, 5), 97.5, 98.5, 99, 99.5, 99.75, 99.9, 100]
# Lengths in pieces (words, digits, signs) of the 7,473 answers of GSM8K's training split.
LENGTHS = [
    27, 45, 50, 56, 64, 70, 76, 82, 87, 92, 98, 104, 110, 117, 124, 132, 141, 149, 161, 174, 194, 226, 252, 272, 287,
    313, 343, 367, 447,
]  # fmt: skip
PIECE = re.compile(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s+|_")
PADDED_BATCH = 32
ROOF_SIZE = 1024
RATIO_CLIP = 8.0

Arrays = dict[str, NDArray[Any]]


@dataclass
class Figures:
    """Measurements with one dtype, one entry per repetition.

    Attributes:
        ours: seconds of our step.
        plain: seconds of the plain loop's step.
        roof: FLOP/s of the matrix products around our step.
        losses: of the first step, ours and the plain loop's, which shows that both do the same work.
    """

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    roof: list[float] = field(default_factory=list)
    losses: tuple[float, float] = (0.0, 0.0)

    def fraction(self, flops: float) -> float:
        """Return the fraction of the roof."""
        return statistics.median(flops / s / roof for s, roof in zip(self.ours, self.roof, strict=True))

    @property
    def speedup(self) -> float:
        """Return the speed-up over the plain loop."""
        return statistics.median(b / a for a, b in zip(self.ours, self.plain, strict=True))


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    sequences = draw_sequences(arguments)
    lengths = np.array([len(sequence["tokens"]) for sequence in sequences])
    ratio = padded_tokens(lengths) / lengths.sum()
    with tempfile.TemporaryDirectory() as directory, join_world("cpu", 600, TrainerModelConfig()) as world:
        config = Qwen3Config(**SHAPE, max_position_embeddings=8192)
        config.save_pretrained(directory)
        steps = {dtype: make_steps(arguments, directory, dtype, sequences, world) for dtype in arguments.dtypes}
        flops, parameters = count_flops(directory, world, lengths)
        figures = measure(arguments, steps)
    print(
        f"{parameters:,} parameters, {len(lengths)} sequences, {lengths.sum():,} tokens, {flops / 1e9:.0f} GFLOP a step"
    )
    print(f"{arguments.threads} thread(s), torch {torch.__version__}, median of {arguments.repeats}")
    print(f"{'':10}{'step':>9}{'tokens/s':>10}{'roof':>14}{'fraction':>10}{'plain':>9}{'speed-up':>10}{'limit':>8}")
    for dtype, got in figures.items():
        seconds, best = statistics.median(got.ours), statistics.median(got.roof) / 1e9
        print(
            f"{dtype:10}{seconds:7.2f} s{lengths.sum() / seconds:10,.0f}{best:7.0f} GFLOP/s"
            f"{got.fraction(flops):9.3f}{statistics.median(got.plain):8.2f} s{got.speedup:10.2f}{ratio:8.2f}"
        )
        print(f"{'':10}loss of the first step {got.losses[0]:.5f}, plain {got.losses[1]:.5f}")
    if arguments.json:
        report = {f"fraction_of_roof_{short(dtype)}": got.fraction(flops) for dtype, got in figures.items()}
        report |= {"speedup_vs_padded": min(got.speedup for got in figures.values()), "padding_ratio": float(ratio)}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="in a step (default: %(default)s)")
    parser.add_argument("--lengths", type=Path, help="file with other lengths")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a forward pass (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float32": "fp32"}[dtype]


def draw_sequences(arguments: argparse.Namespace) -> list[Arrays]:
    """Draw tokens, advantages and log-probabilities, with lengths spread evenly over the distribution."""
    random, count = np.random.default_rng(0), arguments.sequences
    quantiles = (np.arange(count) + 0.5) / count * 100
    if arguments.lengths:
        lengths = np.percentile(read_lengths(arguments.lengths), quantiles)
    else:
        lengths = np.interp(quantiles, PERCENTS, LENGTHS)
    sequences = []
    for length in random.permutation(np.maximum(2, lengths.round().astype(int))):
        sequences.append(
            {
                "tokens": random.integers(0, SHAPE["vocab_size"], length),
                "logprobs": np.full(length, -np.log(SHAPE["vocab_size"]), np.float32),
                "advantages": np.full(length, random.standard_normal(), np.float32),
            }
        )
    return sequences


def read_lengths(path: Path) -> list[int]:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".jsonl":
        return [len(PIECE.findall(json.loads(line)["answer"])) for line in lines]
    return [int(word) for line in lines for word in line.split()]


def padded_tokens(lengths: NDArray[np.integer]) -> int:
    batches = [lengths[i : i + PADDED_BATCH] for i in range(0, len(lengths), PADDED_BATCH)]
    return sum(len(batch) * int(batch.max()) for batch in batches)


@dataclass(frozen=True)
class Steps:
    """One step of each kind; both return the loss."""

    dtype: torch.dtype
    ours: Callable[[], float]
    plain: Callable[[], float]


def make_steps(
    arguments: argparse.Namespace, directory: str, dtype: str, sequences: Sequence[Arrays], world: World
) -> Steps:
    random_init: Any = {"random_init": True}
    model = TrainerModelConfig(name=directory, dtype=dtype, debug=random_init, seq_len=arguments.row)
    policy, optim = make_policy(model, 0, world), AdamWConfig(lr=1e-4)
    engine = TrainStep(policy, build_optimizer(optim, policy), world, optim.max_norm)
    objective = build_objective(AIPOLossConfig(ratio_clip=RATIO_CLIP), arguments.row)
    weights = {name: value.full_tensor().clone() for name, value in policy.causal_lm.state_dict().items()}
    plain = make_plain_step(directory, getattr(torch, dtype), weights, sequences)
    return Steps(
        getattr(torch, dtype),
        # Each step builds its rows, like the trainer.
        lambda: engine.step([pack(sequences, arguments.row)], objective, 1.0).loss or float("nan"),
        plain,
    )


def pack(sequences: Sequence[Arrays], row: int) -> Minibatch:
    lengths = [len(sequence["tokens"]) for sequence in sequences]
    rows = []
    for items in best_fit_decreasing(lengths, row):
        part = {name: np.concatenate([sequences[i][name] for i in items]) for name in sequences[0]}
        mask = np.concatenate([np.arange(lengths[i]) > 0 for i in items])
        rows.append(make_micro_batch(part.pop("tokens"), mask, [lengths[i] for i in items], **part))
    return Minibatch(rows, Counts(tokens=sum(lengths) - len(lengths), sequences=len(lengths)))


def make_plain_step(
    directory: str, dtype: torch.dtype, weights: dict[str, Tensor], sequences: Sequence[Arrays]
) -> Callable[[], float]:
    """Return the step of a plain loop around a model of transformers: pad, forward, loss, backward; clip and update."""
    config = Qwen3Config.from_pretrained(directory)
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    model.load_state_dict(weights, strict=False)
    model = model.to(dtype).train()
    optim = AdamWConfig(lr=1e-4)
    betas = (optim.beta1, optim.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=betas, weight_decay=optim.weight_decay, fused=True
    )
    trained = sum(len(sequence["tokens"]) - 1 for sequence in sequences)

    def step() -> float:
        total = 0.0
        for begin in range(0, len(sequences), PADDED_BATCH):
            batch = [sequences[i] for i in range(begin, min(begin + PADDED_BATCH, len(sequences)))]
            tokens, logprobs, advantages = (pad(batch, name) for name in ("tokens", "logprobs", "advantages"))
            attention_mask = pad([{"mask": np.ones(len(s["tokens"]), np.int64)} for s in batch], "mask")
            logits = model(input_ids=tokens, attention_mask=attention_mask, use_cache=False).logits[:, :-1].float()
            ours = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            ratio = (ours.view(len(batch), -1) - logprobs[:, 1:]).clamp(-20, 20).exp().clamp(max=RATIO_CLIP)
            loss = -(ratio * advantages[:, 1:] * attention_mask[:, 1:]).sum() / trained
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def pad(batch: Sequence[Arrays], name: str) -> Tensor:
    longest = max(len(sequence[name]) for sequence in batch)
    return torch.from_numpy(np.stack([np.pad(s[name], (0, longest - len(s[name]))) for s in batch]))


def count_flops(directory: str, world: World, lengths: NDArray[np.integer]) -> tuple[float, int]:
    """Return the model FLOPs of a step and the number of parameters."""
    random_init: Any = {"random_init": True}
    policy = make_policy(TrainerModelConfig(name=directory, debug=random_init), 0, world)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    return ModelFlops.of(policy).total(lengths, int(lengths.sum()) - len(lengths)), parameters


def measure(arguments: argparse.Namespace, steps: dict[str, Steps]) -> dict[str, Figures]:
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    figures = {dtype: Figures(losses=(step.ours(), step.plain())) for dtype, step in steps.items()}  # also the warm-up
    for _ in range(arguments.repeats):
        for dtype, step in steps.items():
            before = roof(step.dtype, clock)
            begin = clock()
            step.ours()
            middle = clock()
            after = roof(step.dtype, clock)
            start = clock()
            step.plain()
            figures[dtype].plain.append(clock() - start)
            figures[dtype].ours.append(middle - begin)
            figures[dtype].roof.append((before + after) / 2)
    return figures


def roof(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Return FLOP/s of square matrix products, median of five."""
    a = torch.ones(ROOF_SIZE, ROOF_SIZE, dtype=dtype)
    out, seconds = torch.empty_like(a), []
    for _ in range(5):
        begin = clock()
        torch.mm(a, a, out=out)
        seconds.append(clock() - begin)
    return 2 * ROOF_SIZE**3 / statistics.median(seconds)


if __name__ == "__main__":
    main()
