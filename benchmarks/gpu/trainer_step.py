"""How fast is the trainer's step engine alone? Random batches, random weights of Qwen3-0.6B's shape, one device:

    python benchmarks/gpu/trainer_step.py --json FILE
    python benchmarks/gpu/trainer_step.py --device cpu --layers 2 --hidden 64 --heads 4 --kv-heads 2 --head-dim 16 \
        --vocabulary 512 --row 256 --rows 2 --rollout 64 --steps 3

The model is made from a configuration: nothing is downloaded. Needs the project without vllm (torch 2.11 to 2.13,
transformers 5.17 or newer), installed or with PYTHONPATH=src. A step is what the trainer does between a batch and its
publication: forward, backward and clipped AdamW over `--minibatches` parts of `--rows` packed rows. Printed is the
median of the steps after the warm-up, beside its limit: the tokens/s at which the device would be at its peak.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from prime_rl.configs.optim import AdamWConfig
from prime_rl.configs.trainer import ActivationCheckpointConfig, AIPOLossConfig, FakeDataConfig, TrainerModelConfig
from prime_rl.trainer import attention
from prime_rl.trainer.engine import Engine, StepResult
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.parallel import World, compute_dtype, join_world, shard
from prime_rl.trainer.perf import ModelFlops, peak_flops
from prime_rl.trainer.rl.batches import fake_batch, split_batch
from prime_rl.trainer.rl.objective import rl_objective

_TIMEOUT_S = 600
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured.

    Attributes:
        seconds: of each timed step.
        tokens: in each step.
        peak_memory_gib: most that torch allocated in the timed steps; None on a CPU.
        flops: model FLOPs of a step, recomputation not counted.
        peak_flops: FLOP/s of the device: the data sheet's, or a matrix product's timed now.
        loss: of the last step.
        grad_norm: of the last step.
    """

    seconds: list[float]
    tokens: int
    peak_memory_gib: float | None
    flops: float
    peak_flops: float
    loss: float | None
    grad_norm: float | None

    @property
    def tokens_per_second(self) -> float:
        """At the median step."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def limit(self) -> float:
        """Tokens per second at the device's peak."""
        return self.tokens * self.peak_flops / self.flops

    @property
    def mfu(self) -> float:
        """Share of the peak."""
        return self.tokens_per_second / self.limit


def main() -> None:
    arguments = parse_arguments()
    with join_world(arguments.device, _TIMEOUT_S) as world:
        policy = make_policy(arguments)
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        figures = measure(arguments, policy, world)
        device = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.processor() or "cpu"
    print(f"{parameters:,} parameters on {device}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"tokens/s     {figures.tokens_per_second:12,.0f}   limit {figures.limit:,.0f}")
    print(f"MFU          {figures.mfu:12.1%}   of {figures.peak_flops / 1e12:.3g} TFLOP/s")
    memory = "-" if figures.peak_memory_gib is None else f"{figures.peak_memory_gib:.2f} GiB"
    print(f"peak memory  {memory:>12}")
    print(f"step         {statistics.median(figures.seconds):10.3f} s   {min(figures.seconds):.3f} .. ", end="")
    print(f"{max(figures.seconds):.3f} s, {figures.tokens:,} tokens")
    if arguments.json:
        report = {
            "device": device, "parameters": parameters, "torch": torch.__version__,
            "transformers": transformers.__version__, "tokens_per_second": figures.tokens_per_second,
            "limit_tokens_per_second": figures.limit, "mfu": figures.mfu, **asdict(figures),
            "arguments": {name: value for name, value in vars(arguments).items() if name != "json"},
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    shape = parser.add_argument_group("model, by default that of Qwen3-0.6B")
    shape.add_argument("--layers", type=int, default=28)
    shape.add_argument("--hidden", type=int, default=1024)
    shape.add_argument("--intermediate", type=int, help="three times hidden if left out")
    shape.add_argument("--heads", type=int, default=16)
    shape.add_argument("--kv-heads", type=int, default=8)
    shape.add_argument("--head-dim", type=int, default=128)
    shape.add_argument("--vocabulary", type=int, default=151_936)
    batch = parser.add_argument_group("batch")
    batch.add_argument("--rows", type=int, default=2, help="packed rows (default: %(default)s)")
    batch.add_argument("--row", type=int, default=8192, help="tokens of a row, one forward pass (default: %(default)s)")
    batch.add_argument("--rollout", type=int, default=1024, help="tokens of a rollout (default: %(default)s)")
    batch.add_argument("--minibatches", type=int, default=1, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--ac", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.steps, arguments.minibatches) < 1 or not 2 <= arguments.rollout <= arguments.row:
        parser.error("--rows, --steps and --minibatches are at least 1, and --rollout is between 2 and --row")
    return arguments


def make_policy(arguments: argparse.Namespace) -> PolicyModel:
    """Draw a model; float32, as the trainer loads it."""
    attention.register()
    config = transformers.Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate or 3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        max_position_embeddings=max(40_960, arguments.row),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    return PolicyModel(transformers.AutoModelForCausalLM.from_config(config, **options).eval())


def measure(arguments: argparse.Namespace, policy: PolicyModel, world: World) -> Figures:
    """Shard the model as the trainer does, and time its steps."""
    settings = TrainerModelConfig(seq_len=arguments.row, ac=ActivationCheckpointConfig() if arguments.ac else None)
    shard(policy, settings, world)
    optim = AdamWConfig()
    engine = Engine(policy, build_optimizer(optim, policy), world, optim.max_norm)
    objective = rl_objective(build_loss(AIPOLossConfig()))
    per_row = arguments.row // arguments.rollout
    data = FakeDataConfig(batch_size=arguments.rows * per_row, seq_len=arguments.rollout, micro_batch_size=per_row)
    batch = fake_batch(data, policy.vocabulary, arguments.row, seed=0, step=0)

    def step() -> StepResult:
        return engine.step(split_batch(batch, 0, arguments.minibatches, world, arguments.row), objective, 1.0)

    result, seconds, memory = time_steps(step, arguments.warmup, arguments.steps, world.device)
    return Figures(
        seconds=seconds,
        tokens=len(batch.tokens),
        peak_memory_gib=memory,
        flops=ModelFlops.of(policy).total(batch.seq_lens, batch.loss_tokens),
        peak_flops=peak_flops(world.device, compute_dtype(settings.dtype, world.device)),
        loss=result.loss,
        grad_norm=result.grad_norm,
    )


def time_steps(
    step: Callable[[], StepResult], warmup: int, steps: int, device: torch.device
) -> tuple[StepResult, list[float], float | None]:
    """Return the last result, the seconds of each timed step and the peak of allocated memory."""
    cuda = device.type == "cuda"
    for _ in range(warmup):
        step()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        result = step()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return result, seconds, torch.cuda.max_memory_allocated(device) / _GIB if cuda else None


if __name__ == "__main__":
    main()
