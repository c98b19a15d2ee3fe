"""Speed of the trainer's step with random tokens and random weights of Qwen3 shapes on one device.

    python benchmarks/gpu/trainer_step.py --scenario rl-16k --json FILE      # one; --list shows all
    python benchmarks/gpu/trainer_step.py --scenario all --json FILE         # each in a separate process
    python benchmarks/gpu/trainer_step.py --scenario all --tiny --device cpu --no-compile --steps 1 --warmup 1

Nothing is downloaded: models are created from a configuration and loaded, sharded and trained by the trainer's code. A
step is forward, backward and clipped AdamW over two packed rows; every token but the first of each sequence is
trained. With `publish` it includes the publication of every version, which is written during the next step. The figure
is the tokens of all timed steps over their time, after a warm-up that compiles the blocks. `agreement` compares
log-probabilities in bfloat16 with those in float32 on the same device.

Needs the project without vllm (torch 2.11 to 2.13, transformers 5.17 or newer), installed or with PYTHONPATH=src.
"""

import argparse
import gc
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scenarios import SCENARIOS, SMALL, TINY, Scenario, Shape, tiny

from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.batch import Batch
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.memory_savings import prepare_optimizer
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World, join_world
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.sft.train import sft_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.trainer_metrics import ModelFlops, peak_flops
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import make_policy

_TIMEOUT_SECONDS = 600
_GIB = 1024**3
_AGREE = 2e-2
_MEMORY = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def main() -> None:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read at the first allocation
    arguments = parse_arguments()
    if arguments.list:
        for name, scenario in SCENARIOS.items():
            print(f"{name:20} {scenario.rows} x {scenario.row:,} tokens in sequences of {scenario.sequence:,}")
        print("agreement            log-probabilities in bfloat16 and float32")
    elif arguments.table:
        print(table(json.loads(arguments.json.read_text())["scenarios"]))
    elif len(arguments.scenario) > 1:
        failed = [name for name in arguments.scenario if not run_in_child(arguments, name)]
        if arguments.json and arguments.json.exists():
            print(table(json.loads(arguments.json.read_text())["scenarios"]))
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
    else:
        (name,) = arguments.scenario
        figures = agreement(arguments) if name == "agreement" else first_that_works(name, arguments)
        print(json.dumps({name: figures}, indent=1))
        if arguments.json:
            record(arguments.json, name, figures)
        if "error" in figures:
            sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*SCENARIOS, "agreement"]
    parser.add_argument("--scenario", default="rl-16k", help="comma-separated names, or all")
    parser.add_argument("--list", action="store_true", help="show the scenarios")
    parser.add_argument("--table", action="store_true", help="only print the table of the --json file")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default: %(default)s)")
    parser.add_argument("--way", type=int, help="try only this way of the scenario's, from 0")
    parser.add_argument("--attn", default="auto", help="model.attn (default: %(default)s); varlen: FlashAttention-2")
    parser.add_argument("--no-compile", action="store_true", help="run the blocks eagerly")
    parser.add_argument(
        "--publish", type=Path, default=Path(tempfile.gettempdir()), help="directory of published weights"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows, to try the script on a CPU")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    arguments = parser.parse_args()
    arguments.scenario = known if arguments.scenario == "all" else arguments.scenario.split(",")
    if unknown := set(arguments.scenario) - set(known):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if arguments.table and arguments.json is None:
        parser.error("--table needs --json")
    if min(arguments.steps, arguments.warmup + 1) < 1:
        parser.error("--steps is at least 1 and --warmup at least 0")
    return arguments


def run_in_child(arguments: argparse.Namespace, name: str) -> bool:
    """Run one scenario with the same arguments in a new process, which starts with all memory free."""
    print(f"== {name}", flush=True)
    return (
        subprocess.run([sys.executable, *sys.argv, "--scenario", name], check=False).returncode == 0
    )  # the last option takes effect


def first_that_works(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the first way that does not fail; record the errors of earlier ways."""
    scenario = tiny(SCENARIOS[name]) if arguments.tiny else SCENARIOS[name]
    ways = scenario.ways if arguments.way is None else scenario.ways[arguments.way : arguments.way + 1]
    failures: list[str] = []
    with join_world(arguments.device, _TIMEOUT_SECONDS) as world:
        for way in ways:
            keys = {key: value for key, value in way.items() if key != "compile" or not arguments.no_compile}
            try:
                figures = measure(replace(scenario, ways=(keys,)), arguments, world)
                return {**figures, "failed_before": failures}
            except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:  # memory, a kernel, a compiler
                failures.append(f"{keys}: {type(error).__name__}: {str(error).splitlines()[0]}")
            torch._dynamo.reset()
            gc.collect()  # a block and its new forward refer to each other
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    return {"error": failures[-1], "failed_before": failures[:-1]}


def measure(scenario: Scenario, arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Train like the trainer and measure the time."""
    (keys,) = scenario.ways
    with model_directory(scenario.shape, scenario.row) as directory:
        config = TrainerModelConfig(
            name=str(directory), seq_len=scenario.row, attn=arguments.attn, debug={"random_init": True}, **keys
        )
        policy = make_policy(config, 0, world)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        dtype = compute_dtype(config.dtype, world.device)
        publisher = Publisher(policy, tokenizer, dtype, world, canary=dtype) if scenario.publish else None
    optim = AdamWConfig()
    optimizer = prepare_optimizer(build_optimizer(optim, policy), config)
    engine = TrainStep(policy, optimizer, world, optim.max_norm)
    if publisher is not None:
        publisher.guard(optimizer)
    objective = sft_objective if scenario.kind == "sft" else build_objective(AIPOLossConfig(), config.seq_len)
    batch = make_batch(scenario)

    def version(number: int) -> Path:
        return arguments.publish / f"benchmark-{os.getpid()}-{number}"

    def step(number: int) -> dict[str, Any]:
        begin = time.perf_counter()
        result = engine.step(split_batch(batch, 0, 1, world, scenario.row), objective, 1.0)
        finish(world.device)
        trained = time.perf_counter()
        if publisher is not None:
            publisher.start(version(number), PolicyVersion(0, number))  # waits for the previous publication
        end = time.perf_counter()
        shutil.rmtree(version(number - 1), ignore_errors=True)
        writing = publisher.metrics()["weight_sync/seconds"] if publisher is not None else None
        return {
            "train": trained - begin,
            "publish": end - trained,
            "writing": writing,
            "loss": result.loss,
            "norm": result.grad_norm,
        }

    steps = timed(step, arguments, world.device)
    if publisher is not None:
        publisher.close()
        shutil.rmtree(version(arguments.warmup + arguments.steps - 1))
    flops = ModelFlops.of(policy)
    return summarise(scenario, config, steps, batch, flops, peak_flops(world.device, dtype), world)


def timed(
    step: Callable[[int], dict[str, Any]], arguments: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    for number in range(arguments.warmup):
        step(number)
    finish(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return [step(arguments.warmup + number) for number in range(arguments.steps)]


def summarise(
    scenario: Scenario,
    config: TrainerModelConfig,
    steps: list[dict[str, Any]],
    batch: Batch,
    flops: ModelFlops,
    peak: float,
    world: World,
) -> dict[str, Any]:
    """Return the figures with their goals. MFU is that of the step without publication."""
    tokens, train = len(batch.tokens), sum(s["train"] for s in steps) / len(steps)
    whole = train + sum(s["publish"] for s in steps) / len(steps)
    cuda = world.device.type == "cuda"
    gib = torch.cuda.max_memory_allocated(world.device) / _GIB if cuda else None
    speed = tokens / whole
    reached = None if scenario.goal is None else speed >= scenario.goal
    fits = None if scenario.most_gib is None or gib is None else gib <= scenario.most_gib
    return {
        "tokens_per_second": speed,
        "tokens_per_second_without_publication": tokens / train,
        "seconds": [s["train"] for s in steps],
        "seconds_publish": [s["publish"] for s in steps] if scenario.publish else None,
        "seconds_writing": [s["writing"] for s in steps] if scenario.publish else None,
        "tokens": tokens,
        "mfu": flops.total(batch.seq_lens, batch.loss_tokens) / train / peak,
        "mfu_upstream": flops.total_upstream(batch.seq_lens) / train / peak,
        "limit_tokens_per_second": tokens * peak / flops.total(batch.seq_lens, batch.loss_tokens),
        "peak_gib": gib,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(world.device) / _GIB if cuda else None,
        "loss": steps[-1]["loss"],
        "grad_norm": steps[-1]["norm"],
        "goal": scenario.goal,
        "goal_reached": reached,
        "most_gib": scenario.most_gib,
        "fits": fits,
        "upstream": asdict(scenario.upstream) if scenario.upstream else None,
        "over_upstream": speed / _comparable(scenario) if scenario.upstream else None,
        "model": config.model_dump(mode="json", exclude={"name"}, exclude_defaults=True),
    }


def _comparable(scenario: Scenario) -> float:
    assert scenario.upstream is not None
    return scenario.upstream.published if scenario.publish else scenario.upstream.step


def make_batch(scenario: Scenario) -> Batch:
    """Draw full rows of equal sequences; all tokens but the first of each sequence are trained."""
    per_row = scenario.row // scenario.sequence
    data = FakeDataConfig(batch_size=scenario.rows * per_row, seq_len=scenario.sequence, micro_batch_size=per_row)
    batch = fake_batch(data, scenario.shape.vocabulary, scenario.row, seed=0, step=0)
    mask = np.concatenate([np.arange(n) for n in batch.seq_lens]) > 0
    logprobs = np.where(mask, -np.log(scenario.shape.vocabulary), 0).astype(np.float32)
    return replace(
        batch, loss_mask=mask.astype(np.uint8), logprobs=logprobs, versions=np.where(mask, 0, -1).astype("i4")
    )


def agreement(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare log-probabilities in bfloat16 and float32, for a packed row and for a row of one sequence."""
    shape, length = (TINY, 128) if arguments.tiny else (SMALL, 8192)
    random = np.random.default_rng(0)
    tokens = random.integers(0, shape.vocabulary, length)
    rows = {}
    for name, sequence in {"packed": length // 16, "one sequence": length}.items():
        lengths = [sequence] * (length // sequence)
        rows[name] = make_micro_batch(tokens, np.concatenate([np.arange(n) for n in lengths]) > 0, lengths)
    with join_world(arguments.device, _TIMEOUT_SECONDS) as world, model_directory(shape, length) as directory:
        options = {"name": str(directory), "seq_len": length, "debug": {"random_init": True}}
        half = {"dtype": "bfloat16", "attn": arguments.attn, **({} if arguments.no_compile else {"compile": {}})}
        got, wanted = (
            score(TrainerModelConfig(**options, **keys), rows, world)
            for keys in (half, {"dtype": "float32", "attn": "varlen"})
        )
    figures: dict[str, Any] = {}
    for name, row in rows.items():
        mask = row.loss_mask.numpy()
        far = np.abs(got[name] - wanted[name])[mask]
        figures[name] = {"largest": float(far.max()), "mean": float(far.mean()), "p99": float(np.quantile(far, 0.99))}
        figures[name]["spread_of_logprobs"] = float(wanted[name][mask].std())
    largest = max(f["largest"] for f in figures.values())
    return {**figures, "largest": largest, "most": _AGREE, "goal_reached": largest <= _AGREE}


@torch.no_grad()
def score(config: TrainerModelConfig, rows: dict[str, Any], world: World) -> dict[str, np.ndarray]:
    policy = make_policy(config, 0, world)
    return {name: policy(row.to(world.device))[0].cpu().numpy() for name, row in rows.items()}


@contextmanager
def model_directory(shape: Shape, longest: int) -> Iterator[Path]:
    """Write configuration and tokenizer of a model with random weights."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(40_960, longest),
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_SPECIAL)}, unk_token=_SPECIAL[0]))
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0]).save_pretrained(
            directory
        )
        yield Path(directory)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record(path: Path, name: str, figures: dict[str, Any]) -> None:
    """Add the figures to the file, with versions and device."""
    cuda = torch.cuda.is_available()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    figures |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "transformers": transformers.__version__,
        "commit": commit or None,
    }
    report = json.loads(path.read_text()) if path.exists() else {"scenarios": {}}
    report["scenarios"][name] = figures
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def table(scenarios: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with one line per scenario."""
    lines = [
        "| scenario | tokens/s | goal | upstream: step, published | MFU | peak GiB | upstream | settings |",
        "|" + "---|" * 8,
    ]
    for name, figures in scenarios.items():
        if "tokens_per_second" not in figures:
            rest = figures.get("error", f"largest difference {figures.get('largest', float('nan')):.2g} nats")
            lines.append(f"| {name} | {rest} |" + " |" * 6)
            continue
        upstream = figures["upstream"]
        theirs = f"{upstream['step']:,.0f}, {upstream['published']:,.0f}" if upstream else "-"
        keys = {k: v for k, v in figures["model"].items() if k not in ("seq_len", "debug")}
        cells = [
            name, f"{figures['tokens_per_second']:,.0f}", f"{figures['goal']:,.0f}" if figures["goal"] else "-", theirs,
            f"{figures['mfu']:.1%}", f"{figures['peak_gib']:.1f}" if figures["peak_gib"] else "-",
            f"{upstream['peak_gib']}" if upstream else "-", f"`{json.dumps(keys)}`",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
