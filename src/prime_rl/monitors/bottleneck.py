"""Names the bottleneck of a run in one line, from its metrics. Console, page and doctor show the same line.

The trainer waits for batches, and sampling waits for versions. Who waits is not the bottleneck; if both wait, they wait
for something between them. The causes of one side share its time, and the largest share names the bottleneck.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

Row = Mapping[str, Any]
NUM_STEPS = 10
_MIN_STEPS = 3
_MIN_SHARE = 0.1
"""Waits below this share of the time have no cause."""
LARGE_WAIT = 0.25
"""Waits from this share of the time on are a warning with a remedy."""
_MOST = 0.5
_BLOCKED_LOOP_SECONDS = 0.5
_HINTS = {
    "inference": "add inference GPUs (without GPUs: cores), or lower max_tokens or rollouts_per_example",
    "request limit": "set a higher inference.vllm.max_num_seqs",
    "paused environment": "repair the environment or the server that fails (see its warnings), or raise "
    "env.max_rollouts_per_minute",
    "environment": "raise orchestrator.workers_per_env, or make the environment faster",
    "grader": "make the reward function faster or asynchronous, or raise orchestrator.workers_per_env",
    "orchestrator": "raise orchestrator.workers_per_env, or give the orchestrator more CPU cores",
    "trainer": "add trainer GPUs (without GPUs: cores), put more tokens into a forward pass (trainer.model.seq_len, in "
    "sft data.micro_batch_size), or lower batch_size",
    "other runs": "add trainer GPUs (without GPUs: cores), or lower max_concurrent_runs",
    "staleness bound": "raise async_level: trainer and inference wait for each other",
    "evaluation": "raise eval.interval, lower eval.num_examples, or give it servers of its own (eval.base_url)",
    "weight update": "use a faster disk or network",
    "checkpoint": "raise ckpt.interval, or write checkpoints to a faster disk",
    "data": "raise the number of workers, or use a faster disk",
}
"""Cause -> what reduces it."""
FIXED_LIMIT, _FIRST_LIMIT, _LARGEST_LIMIT = (
    f"orchestrator.{key}" for key in ("max_concurrent", "concurrency.initial", "concurrency.max")
)
"""Keys of the limit of rollouts in flight."""
_KV_HELD = 0.6
"""Usage of the KV cache from which an adaptive limit does not grow."""
_ADAPTERS = ', or publish adapters (trainer.model.lora.publish = "adapter")'
_TOOK = {"trainer": "training", "other runs": "other runs"}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limits the speed of a run: a cause with a remedy, or None if nothing waits for long; and the evidence.

    Attributes:
        window: begin and end of the steps that count, in Unix seconds.
        remedy: what reduces it; empty for the usual one of the cause.
        waiting: share of the time for which the side that waits longest waited.
    """

    cause: str | None
    evidence: str
    where: str = ""
    window: tuple[float, float] = (0.0, 0.0)
    remedy: str = ""
    waiting: float = 0.0

    @property
    def is_large(self) -> bool:
        """Whether it is worth a warning."""
        return self.cause is not None and self.waiting >= LARGE_WAIT

    def __str__(self) -> str:
        if self.cause is None:
            return f"no bottleneck: {self.evidence}"
        if not self.is_large:
            return f"no large bottleneck ({self.cause}{self.where}): {self.evidence}"
        return f"{self.cause}{self.where} is the bottleneck: {self.evidence}; {self.remedy or _HINTS[self.cause]}"


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """Settings of a run that its bottleneck depends on.

    Attributes:
        limit_key: the key that limits the rollouts in flight.
        request_limit: requests that all engines process at once, from `inference.vllm.max_num_seqs`; None if unknown.
        publishes_adapters: versions are adapters.
    """

    limit_key: str = FIXED_LIMIT
    request_limit: int | None = None
    publishes_adapters: bool = False


def speed_settings(config: Row) -> SpeedSettings:
    """Select the settings from the resolved configuration of `rl`; unknown ones get their defaults."""
    limit_key = _LARGEST_LIMIT if _get(config, "orchestrator.concurrency.adaptive", True) else _FIRST_LIMIT
    if isinstance(_get(config, "orchestrator.max_concurrent"), int):
        limit_key = FIXED_LIMIT
    limit, copies = (_get(config, f"inference.{key}") for key in ("vllm.max_num_seqs", "parallel.dp"))
    if isinstance(limit, int):
        servers = _get(config, "orchestrator.client.base_url")
        limit *= (copies if isinstance(copies, int) else 1) * (len(servers) if isinstance(servers, list) else 1)
    is_adapter = _get(config, "trainer.model.lora.publish") == "adapter"
    return SpeedSettings(limit_key, limit if isinstance(limit, int) else None, is_adapter)


def _get(config: Any, key: str, default: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return default
        config = config[part]
    return config


_UNKNOWN = SpeedSettings()


def find_bottleneck(
    trainer: Sequence[Row], orchestrator: Sequence[Row], since: float = 0.0, settings: SpeedSettings = _UNKNOWN
) -> Bottleneck | None:
    """Return what limits the last `NUM_STEPS` steps; None before there are enough.

    Args:
        trainer: lines of metrics/trainer.jsonl in order.
        orchestrator: lines of metrics/orchestrator.jsonl in order, with those of evaluations.
        since: Unix seconds of the last start of a process; earlier lines do not count.
        settings: of the run.
    """
    trained = [row for row in trainer if "time/step" in row and "time" in row and row["time"] >= since]
    trained = trained[-1 - NUM_STEPS :]
    found = _find(trained, orchestrator, settings) if len(trained) > _MIN_STEPS else None
    if found is None:
        return None
    if found.cause == "weight update" and not settings.publishes_adapters:
        found = replace(found, remedy=_HINTS["weight update"] + _ADAPTERS)
    return replace(found, window=(trained[0]["time"], trained[-1]["time"]))


def _find(trained: Sequence[Row], orchestrator: Sequence[Row], settings: SpeedSettings) -> Bottleneck | None:
    """Name what limits the steps after the first one of `trained`."""
    begin, steps = trained[0]["time"], trained[1:]
    total = max(trained[-1]["time"] - begin, 1e-9)
    outside = sum(max(0.0, b["time"] - a["time"] - b["time/step"]) for a, b in pairwise(trained))
    time = _Sum(steps, total)
    found, num = {row["step"] for row in steps}, len(steps)
    latest = {row["step"]: row for row in orchestrator if row.get("step") in found and "time/wait_for_policy" in row}
    shipped = list(latest.values())  # a resumed run repeats steps
    if not shipped:
        loading = time("load_data")
        evidence = f"the trainer waited {loading:.0%} of the last {num} steps for rows"
        return Bottleneck("data", evidence, waiting=loading) if loading >= _MIN_SHARE else None
    waits = _Sum(shipped, sum(row.get("time/step") or 0.0 for row in shipped) or 1e-9)
    trainer_wait, sampler_wait, checkpoint = time("wait_for_batch"), waits("wait_for_policy"), outside / total
    evidence = f"the trainer waited {trainer_wait:.0%} and sampling {sampler_wait:.0%} of the last {num} steps"
    named = partial(Bottleneck, waiting=max(trainer_wait, sampler_wait))
    # A side that waits much less than the other one is the slow one, and waits only for its input.
    if min(trainer_wait, sampler_wait) >= max(_MIN_SHARE, max(trainer_wait, sampler_wait) / 4):
        update = (_sum(steps, "weight_sync/seconds") + _sum(shipped, "time/weight_update")) / total
        held = _held(orchestrator, begin) / total
        # Both also wait while versions are published and held; the rest is work that the bound keeps from overlapping.
        between = {
            "staleness bound": min(trainer_wait, sampler_wait) - update - held, "weight update": update,
            "evaluation": held, "checkpoint": checkpoint, "other runs": time("wait_for_turn"),
        }  # fmt: skip
        cause = max(between, key=lambda name: between[name])
        took = "" if cause == "staleness bound" else f", {_TOOK.get(cause, f'{cause}s')} took {between[cause]:.0%}"
        return named(cause, evidence + took)
    if trainer_wait >= max(_MIN_SHARE, sampler_wait):
        if (evaluating := _evaluation(orchestrator, trained)) >= _MOST:
            return named("evaluation", f"{evidence}, {evaluating:.0%} of its wait during evaluations")
        if (paused := waits("wait_for_pause")) >= _MOST * trainer_wait:
            return named("paused environment", f"{evidence}, no group could start for {paused:.0%}")
        if (paused := waits("weight_update_pause")) >= _MOST * trainer_wait:
            return named("weight update", f"{evidence}, sampling was paused for {paused:.0%}")
        return replace(_sampling(shipped, evidence, settings), waiting=trainer_wait)
    if sampler_wait >= _MIN_SHARE:
        parts = {
            "trainer": time("train"), "checkpoint": checkpoint, "weight update": time("publish"),
            "other runs": time("wait_for_turn"),
        }  # fmt: skip
        cause = max(parts, key=lambda name: parts[name])
        return named(cause, f"{evidence}, {_TOOK.get(cause, f'{cause}s')} took {parts[cause]:.0%}")
    return named(None, evidence)


class _Sum:
    """Share of a total that the rows spent on a lap."""

    def __init__(self, rows: Sequence[Row], total: float) -> None:
        self._rows, self._total = rows, total

    def __call__(self, name: str) -> float:
        return min(1.0, _sum(self._rows, f"time/{name}") / self._total)


def _sum(rows: Sequence[Row], name: str) -> float:
    return float(sum(row.get(name) or 0.0 for row in rows))


def _sampling(rows: Sequence[Row], evidence: str, settings: SpeedSettings) -> Bottleneck:
    """Name the part of a rollout that takes longest: the engine, an environment or its grader, or our event loop."""
    seconds = defaultdict[tuple[str, str], float](float)
    for row in rows:
        for env, part, value in _rollout_times(row):
            seconds[part, env] += value * (row.get(f"env/{env}/groups") or 1)
    if (lag := mean(row.get("event_loop_lag/median") or 0.0 for row in rows)) >= _BLOCKED_LOOP_SECONDS:
        return Bottleneck("orchestrator", f"{evidence}, the timers of the orchestrator were {lag:.1f} s late")
    total = sum(seconds.values())
    shares = {p: sum(v for (part, _), v in seconds.items() if part == p) / total for p, _ in seconds} if total else {}
    part = max(shares, key=lambda name: shares[name], default="engine")
    engine = shares.get("engine", 0.0)
    if not shares or engine >= _MOST or part == "engine":
        took = f", the engine took {engine:.0%} of the rollouts' time" if shares else ""
        if (limit := _concurrency_limit(rows, evidence, settings.limit_key)) is not None:
            return limit
        if reached := _reached_requests(rows, settings.request_limit):
            return Bottleneck("request limit", evidence + reached)
        return Bottleneck("inference", evidence + took)
    cause = {"scoring": "grader"}.get(part, part)
    slowest = max((key for key in seconds if key[0] == part), key=lambda key: seconds[key])[1]
    return Bottleneck(
        cause,
        f"{evidence}, the {cause} took {shares[part]:.0%} of the rollouts' time",
        f" of {slowest}" if cause == "grader" else f" {slowest}",
    )


def _concurrency_limit(rows: Sequence[Row], evidence: str, limit_key: str) -> Bottleneck | None:
    """Return the limit of rollouts in flight if it holds back sampling in most rows."""
    limits = [row["inference/concurrency_limit"] for row in rows if _is_limited(row, limit_key == _LARGEST_LIMIT)]
    if len(limits) <= _MOST * len(rows):
        return None
    reached = f", sampling reached its limit of {limits[-1]:.0f} rollouts, and no request waited on a server"
    if limit_key == _LARGEST_LIMIT and limits[-1] > limits[0]:  # it still grows
        limit_key = _FIRST_LIMIT
    return Bottleneck("concurrency limit", evidence + reached, remedy=f"set a higher {limit_key}")


def _reached_requests(rows: Sequence[Row], limit: int | None) -> str:
    """Return the evidence that requests wait for a place in the engines' batches and not for KV cache; else ""."""
    full = [
        row
        for row in rows
        if limit and (row.get("inference/requests_running") or 0) >= limit and _kv_usage(row) < _KV_HELD
    ]
    waiting = max((row.get("inference/requests_waiting") or 0 for row in full), default=0)
    if len(full) <= _MOST * len(rows) or not waiting:
        return ""
    ran = f"the engine ran {limit} requests, its limit, up to {waiting:.0f} waited"
    return f", {ran}, and the KV cache was {max(map(_kv_usage, full)):.0%} full"


def _kv_usage(row: Row) -> float:
    return float(row.get("inference/kv_usage/max") or 0.0)


def _is_limited(row: Row, is_adaptive: bool) -> bool:
    """Whether a limit holds back sampling. A full KV cache holds an adaptive one, so then the server is too slow."""
    if is_adaptive and _kv_usage(row) >= _KV_HELD:
        return False
    in_flight, limit = row.get("inference/in_flight"), row.get("inference/concurrency_limit")
    return bool(in_flight and limit and in_flight >= limit and not row.get("inference/requests_waiting"))


def _rollout_times(row: Row) -> Iterator[tuple[str, str, float]]:
    for name, value in row.items():
        if name.startswith("env/") and value:
            env, _, part = name.removeprefix("env/").rpartition("/time/")
            if env and part in ("engine", "environment", "scoring"):
                yield env, part, float(value)


def _evaluation(orchestrator: Sequence[Row], trained: Sequence[Row]) -> float:
    """Share of the trainer's wait within evaluations; 0 if it waits as much without them."""
    spans = [(row["time"] - seconds, row["time"]) for row in orchestrator for seconds in _evaluated(row)]
    inside = outside = in_seconds = out_seconds = 0.0
    for before, row in pairwise(trained):
        wall = max(row["time"] - before["time"], 1e-9)
        overlap = sum(max(0.0, min(end, row["time"]) - max(start, before["time"])) for start, end in spans)
        share, wait = min(1.0, overlap / wall), row.get("time/wait_for_batch") or 0.0
        inside, outside = inside + share * wait, outside + (1 - share) * wait
        in_seconds, out_seconds = in_seconds + share * wall, out_seconds + (1 - share) * wall
    if not in_seconds or not inside or inside / in_seconds < 1.5 * outside / max(out_seconds, 1e-9):
        return 0.0
    return inside / (inside + outside)


def _evaluated(row: Row) -> list[float]:
    found = [row.get(f"{prefix}/time_s") for prefix in ("eval", "val")]
    return [float(seconds) for seconds in found if seconds and "time" in row]


def _held(orchestrator: Sequence[Row], begin: float) -> float:
    """Seconds for which weight updates waited for pinned evaluations since `begin`."""
    rows = [row for row in orchestrator if "eval/held_s" in row and "time" in row]
    before = [row["eval/held_s"] for row in rows if row["time"] < begin][-1:] or [0.0]
    totals = before + [row["eval/held_s"] for row in rows if row["time"] >= begin]
    # A restarted process counts from 0 again.
    return float(sum(later - earlier if later >= earlier else later for earlier, later in pairwise(totals)))
