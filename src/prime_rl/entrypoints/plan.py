"""`plan`: memory, speed and cost of a run from its configuration, without weights, hub or GPU."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from prime_rl.core.entry_point import ArgumentParser, command, exit_with_reader
from prime_rl.core.errors import ConfigError

if TYPE_CHECKING:
    from prime_rl.supervisor.planning.run_plan import RunPlan

_DESCRIPTION = """\
Compute memory, tokens per second, disk, network and cost of a run from its configuration. Exit code 2: it does not fit.

All keys and files of `uv run rl` may follow, with --role sft those of `uv run sft`."""
_ANY_DEGREE = 2**10 * 3**2 * 5 * 7 * 11 * 13
"""A number of ranks that every usual degree of parallelism divides."""
_ROLES = ("all", "trainer", "inference", "sft")

_UNITS = {
    "memory_gib": "GiB",
    "host_gib_per_node": "GiB of host memory",
    "tokens_per_second": "tokens/s",
    "kv_cache_gib": "GiB of KV cache",
}


@command
def main() -> None:
    """Print the plan; exit with 0 if it fits, with 2 and what to change otherwise."""
    with exit_with_reader():
        code = _main(sys.argv[1:])
    sys.exit(code)


def _main(argv: Sequence[str]) -> int:
    arguments, rest = _parse(argv)
    # --help does not need them
    from prime_rl.supervisor.planning.plan_changes import find_changes
    from prime_rl.supervisor.planning.run_plan import as_json, make_plan

    if arguments.published:
        rows = _published_rows()
        print(json.dumps(rows) if arguments.json else "\n".join(_published_lines(rows)))
        return 0
    plan = make_plan(*_read(arguments, rest))
    result = {**as_json(plan), "changes": find_changes(plan), "published": _published_errors()}
    print(json.dumps(result) if arguments.json else "\n".join(_lines(plan, result)))
    return 0 if result["fits"] else 2


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = ArgumentParser(
        "plan",
        usage="uv run plan [@ FILE.toml ...] [--gpus 8xH100] [--json] [--key value ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", help="number and kind, such as 8xH100 (default: as configured, of this machine's)")
    parser.add_argument("--role", choices=_ROLES, default="all", help="plan only one process, on all GPUs")
    parser.add_argument("--prompt-tokens", type=float, help="mean tokens of a prompt (default: 256)")
    parser.add_argument(
        "--completion-tokens",
        type=float,
        help="mean tokens of a completion (default: half of the longest; with --role trainer a row is one sample)",
    )
    parser.add_argument("--price", type=float, help="of a GPU hour, for the cost")
    parser.add_argument(
        "--upstream",
        action="store_true",
        help="plan upstream prime-rl's trainer as in its benchmarks: compiled, float32 below LoRA, whole logits in sft",
    )
    parser.add_argument("--published", action="store_true", help="print the plan beside the published figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, rest = parser.parse_known_args(argv)
    for option in ("prompt_tokens", "completion_tokens", "price"):
        if (value := getattr(arguments, option)) is not None and not 0 < value < 1e12:
            raise ConfigError(f"--{option.replace('_', '-')} {value:g}: set a number above 0 and below 1e12")
    return arguments, rest


def _read(arguments: argparse.Namespace, rest: list[str]) -> tuple[Any, Any]:
    """Return the configuration and the request."""
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.supervisor.planning.gpu_table import GPUS, detect_gpu, parse_gpus
    from prime_rl.supervisor.planning.run_plan import PlanRequest

    if arguments.gpus is not None:
        count, gpu = parse_gpus(arguments.gpus)
        rest = rest if arguments.role == "sft" else [*rest, *_gpu_keys(count, arguments.role, rest)]
    else:
        count, gpu = None, detect_gpu() or GPUS["H100"]
    request = PlanRequest(
        gpu,
        count,
        arguments.role,
        arguments.prompt_tokens,
        arguments.completion_tokens,
        arguments.price,
        arguments.upstream,
    )
    return (SFTConfig if arguments.role == "sft" else RLConfig).load(rest), request


def _gpu_keys(count: int, role: str, rest: list[str]) -> list[str]:
    """Return keys for so many GPUs; of a server's, half, if the configuration does not divide GPUs itself.

    The degrees of parallelism are checked when it is known how many of the GPUs train.
    """
    from prime_rl.configs.loading.sources import CommandLine, read_environment
    from prime_rl.configs.rl import RLConfig

    line = CommandLine(RLConfig, rest)
    given = {one.path[0] for source in (read_environment(RLConfig), *line.files, line.flags) for one in source}
    divides = given & {"inference_gpu_ids", "trainer_gpu_ids", "inference_gpus", "trainer_gpus", "nodes", "slurm"}
    keys = ["--trainer-ranks", str(_ANY_DEGREE)]
    if role == "inference" and "inference" not in given:
        keys += ["--inference.parallel.tp", "1"]  # keys of several processes, such as seq_len, reach configured ones
    served = count if role == "inference" else count // 2
    if divides or role == "trainer" or "inference" not in given or not served:
        return keys
    if role == "inference":
        return [*keys, "--inference-gpus", str(served)]
    served = served // 8 * 8 if served >= 8 else 1 << served.bit_length() - 1
    return [*keys, "--inference-gpus", str(served), "--trainer-gpus", str(count - served)]


def _lines(plan: "RunPlan", result: Mapping[str, Any]) -> Iterator[str]:
    """Format a plan for people."""
    job = plan.trainer or plan.inference
    assert job is not None
    shape, gpu = job.shape, job.gpu
    shared = ", shared by trainer and inference" if plan.shares_gpus else ""
    active = f", {shape.active / 1e9:.3g} billion active" if shape.experts else ""
    yield f"{shape.name}: {shape.parameters / 1e9:.4g} billion parameters{active}"
    yield f"{plan.num_gpus} x {gpu.name} with {gpu.memory:.1f} GiB{shared}"
    if (trainer := result.get("trainer")) is not None:
        yield f"\ntrainer on {trainer['gpus']} GPU(s): {trainer['memory_gib']:.1f} of {trainer['usable_gib']:.1f} GiB"
        yield f"  GiB: {_parts(trainer['memory_parts_gib'])}"
        tokens, seconds = trainer["tokens_per_step"], trainer["seconds_per_step"]
        yield f"  {trainer['tokens_per_second']:,.0f} tokens/s; {tokens:,.0f} tokens in {seconds:.2f} s"
        shares = {name: 100 * part / seconds for name, part in trainer["seconds"].items()}
        yield f"  host memory of a node: {_number(trainer['host_gib_per_node'])} GiB"
        yield f"  time: {', '.join(f'{name} {share:.0f} %' for name, share in shares.items() if share >= 0.5)}"
    if (inference := result.get("inference")) is not None:
        yield f"\ninference on {inference['gpus']} GPU(s): {inference['memory_gib']:.1f} GiB"
        yield f"  GiB: {_parts(inference['memory_parts_gib'])}"
        yield (
            f"  {inference['tokens_per_second']:,.0f} tokens/s, {inference['sequences_per_copy']:,.0f} sequences at a "
            f"time in each copy; a batch takes {inference['seconds_per_batch']:.1f} s, its longest rollout "
            f"{inference['seconds_longest_rollout']:.1f} s"
        )
    if (step := result.get("step")) is not None:
        what = {"train": "the trainer", "sample": "sampling"}.get(step["limited_by"], "the longest rollouts")
        yield f"\nstep: {step['seconds']:.1f} s at async_level {plan.asynchronous}, limited by {what}"
        if (best := step.get("best_division")) is not None:
            yield (
                f"  best division: {best['inference']} GPU(s) for inference and {best['trainer']} for the trainer, "
                f"{best['seconds']:.1f} s"
            )
    if "version" in result:
        shown = {name: _number(value) for name, value in result["version"].items()}
        yield (
            f"\nversion: {shown['full_gb']} GB in full ({shown['full_seconds']} s over the network), "
            f"{shown['delta_gb']} GB as a delta ({shown['delta_seconds']} s); weights/ "
            f"{shown['weights_folder_gb']} GB, a checkpoint {shown['checkpoint_gb']} GB"
        )
    if (cost := result.get("cost")) is not None:
        yield "\ncost: " + ", ".join(f"{value:,.2f} {name.replace('_', ' ')}" for name, value in cost.items())
    yield f"\n{result['published']['statement']}"
    for problem in result["problems"]:
        yield f"\ndoes not fit: {problem}"
    if not result["fits"]:
        yield "change (the first costs least):" if result["changes"] else "no change that the plan knows makes it fit"
        for change in result["changes"]:
            effects = ", ".join(f"{change[key]:,.1f} {unit}" for key, unit in _UNITS.items() if key in change)
            yield f"  {change['change']}: {effects}"


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(part)}" for name, part in parts.items() if part)


def _number(value: float) -> str:
    """Format with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _published_errors() -> dict[str, Any]:
    """Return how far the plan is from upstream's published figures."""
    from prime_rl.supervisor.planning.published_figures import FIGURES, MEMORY_TOLERANCE, SPEED_TOLERANCE

    memory, speed = zip(*(figure.errors for figure in FIGURES), strict=True)
    near = [
        sum(abs(one) <= limit for one in errors)
        for errors, limit in ((memory, MEMORY_TOLERANCE), (speed, SPEED_TOLERANCE))
    ]
    middle = [median(map(abs, errors)) for errors in (memory, speed)]
    statement = (
        f"error against {len(FIGURES)} published figures of upstream's trainer (`--published`; `--upstream` plans it): "
        f"memory within {MEMORY_TOLERANCE:.0%} on {near[0]}, median {middle[0]:.1%}; tokens/s within "
        f"{SPEED_TOLERANCE:.0%} on {near[1]}, median {middle[1]:.1%}. Inference is not calibrated."
    )
    return {"memory_within": near[0], "speed_within": near[1], "rows": len(FIGURES), "statement": statement}


def _published_rows() -> list[dict[str, Any]]:
    from prime_rl.supervisor.planning.published_figures import FIGURES

    return [
        {
            **asdict(one),
            "planned_memory_gib": one.memory_gib * (1 + memory),
            "memory_error": memory,
            "planned_step_seconds": one.step_seconds / (1 + speed),
            "speed_error": speed,
        }
        for one in FIGURES
        for memory, speed in (one.errors,)
    ]


def _published_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "gpus, model, job, tokens; GiB (published), error; seconds/step (published), error of tokens/s"
    for row in rows:
        yield (
            "{gpus:7} {model:16} {job:12} {tokens:7,} {planned_memory_gib:6.1f} ({memory_gib:6.2f}) "
            "{memory_error:+9.1%} {planned_step_seconds:10.2f} ({step_seconds:.2f}) {speed_error:+12.1%}"
        ).format_map(row)


if __name__ == "__main__":
    main()
