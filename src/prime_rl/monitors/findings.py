"""What the curves of a run say about its learning, one line per finding. Page and doctor show the same lines."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, sqrt
from statistics import mean, median, variance
from typing import Any

from prime_rl.monitors.learning_signal import find_missing_signal

Row = Mapping[str, Any]
_MIN_POINTS = 6
_NUM_ERRORS = 3.0
"""A change counts if it is so many times its standard error, and at least `_MIN_CHANGE`."""
_MIN_CHANGE = 0.05
_EXPLODED = 10.0
_COLLAPSED = 0.1
_SATURATED = 0.75
"""A mean reward of this share of the largest one leaves little to explore."""
_MISMATCH_NATS = 1.0
_DISAGREEMENT_NATS = 0.1
_FAILED_SHARE = 0.1
_RECENT = 10
_MIN_FAILED_GROUPS = 3
"""So many groups of an environment must have failed before the first batch."""
_LOWER_IS_BETTER = re.compile("error|fail|timeout|timed_out|mistake|trunc|violat|invalid|repeat")
"""Part of the name of a metric of an environment that may fall without harm."""


def find_problems(
    trainer: Sequence[Row], orchestrator: Sequence[Row], warnings: Sequence[Row] = (), checkpoints: Sequence[int] = ()
) -> list[str]:
    """Return what is probably wrong, the most certain first, each with its evidence and what to do.

    Args:
        trainer: lines of metrics/trainer.jsonl in order.
        orchestrator: lines of metrics/orchestrator.jsonl in order, with those of evaluations.
        warnings: lines of metrics/warnings.jsonl in order.
        checkpoints: steps of the complete ones.
    """
    batches = [row for row in orchestrator if "reward/mean" in row]
    unstable, onset = _instability(trainer, batches, checkpoints)
    found = [*_failures(batches, warnings), *_disagreement(trainer), *unstable, *_hacking(orchestrator, batches)]
    # Equal rollouts and a low entropy since then are consequences of the large updates.
    trainer, batches = ([row for row in rows if row.get("step", 0) < onset] for rows in (trainer, batches))
    missing = find_missing_signal(batches)
    return [*found, *([missing] if missing is not None else []), *_collapse(trainer, batches)]


def _failures(batches: Sequence[Row], warnings: Sequence[Row]) -> Iterator[str]:
    latest = {str(row.get("env")): row for row in warnings if row.get("kind") == "group"}
    recent = batches[-_RECENT - 1 :]
    # The totals begin at 0 again in a process that is started again.
    is_restarted = any(after.get("groups/ended", 0) < one.get("groups/ended", 0) for one, after in pairwise(recent))
    before = recent[0] if len(recent) > _RECENT and not is_restarted else {}
    last = recent[-1] if recent else {}
    failed, ended = (last.get(f"groups/{name}", 0) - before.get(f"groups/{name}", 0) for name in ("failed", "ended"))
    if batches and failed < _FAILED_SHARE * max(1, ended):
        return
    window = f"in the last {_RECENT} batches" if before else "since the start of the orchestrator"
    for env, row in latest.items():
        name, count = f"dropped/error/{env}", row.get("count", 0)
        if last.get(name, 0) - before.get(name, 0) if batches else count >= _MIN_FAILED_GROUPS:
            share = (
                f"{failed:.0f} of {ended:.0f} groups {window}" if batches else f"{count} groups before the first batch"
            )
            # Warnings of earlier releases have no cause; their text has a count.
            what = f"{share} were dropped, for example: {row['cause']}" if row.get("cause") else row.get("text")
            where = "logs/orchestrator.log lists them with their examples; their replies are not recorded"
            yield f"environment {env} or its reward function fails: {what}; {where}"


def _disagreement(trainer: Sequence[Row]) -> Iterator[str]:
    disagreement = _values(trainer, "mismatch_kl/on_policy")[-_RECENT:]
    if disagreement and mean(disagreement) > _DISAGREEMENT_NATS:
        names = {name for row in trainer[-_RECENT:] for name in row if name.startswith("mismatch_kl/on_policy/")}
        means = {name: mean(values) for name in sorted(names) if (values := _values(trainer, name)[-_RECENT:])}
        largest = max(means, key=means.__getitem__, default="")
        largest = largest and f" (largest: {largest}, {means[largest]:.3g})"
        has_own_routes = "moe/max_violation" in trainer[-1] and "routing/replayed" not in trainer[-1]
        cure = "set trainer.model.router_replay = true, and " if has_own_routes else ""
        yield (
            f"trainer and sampler disagree: mismatch_kl/on_policy is {mean(disagreement):.3g} nats{largest}, and 0 is "
            f"expected; {cure}compare model.dtype and quantization of both"
        )


def _instability(trainer: Sequence[Row], batches: Sequence[Row], checkpoints: Sequence[int]) -> tuple[list[str], float]:
    """Updates that are too large: gradients, mismatch and entropy explode, and the reward falls.

    Returns:
        The finding, if any, and the first step with a sign of it; infinity without a finding.
    """
    all_norms, entropies = _values(trainer, "grad_norm"), _ends(_values(trainer, "entropy"))
    rewards = _values(batches, "reward/mean")
    signs: dict[str, float] = {}

    def first_step(name: str, limit: float, skipped: int = 0) -> float:
        return next((row.get("step", 0) for row in trainer[skipped:] if (row.get(name) or 0) > limit), inf)

    if (norms := _ends(all_norms)) is not None:
        # The first steps may have no gradient.
        base = max(mean(norms[0]), median(all_norms[: len(all_norms) // 2]))
        if mean(norms[1]) > _EXPLODED * base > 0:
            text = f"the gradient norm rose from {base:.3g} to {mean(norms[1]):.3g}"
            signs[text] = first_step("grad_norm", _EXPLODED * base)
    mismatch = _values(trainer, "mismatch_kl")[-_RECENT:]
    if mismatch and mean(mismatch) > _MISMATCH_NATS:
        signs[f"mismatch_kl is {mean(mismatch):.3g} nats"] = first_step("mismatch_kl", _MISMATCH_NATS)
    if entropies and mean(entropies[1]) > (limit := max(1.0, 2 * mean(entropies[0]))):
        text = f"the entropy rose from {mean(entropies[0]):.3g} to {mean(entropies[1]):.3g} nats"
        signs[text] = first_step("entropy", limit, len(entropies[0]))
    if skipped := sum(row.get("optim/skipped") or 0 for row in trainer[-_RECENT:]):
        text = f"{skipped:.0f} updates of the last {_RECENT} steps were skipped, since gradients are not finite"
        signs[text] = first_step("optim/skipped", 0)
    if (fall := _fall(rewards)) is not None:
        text, middle = f"the reward fell from {fall[0]:.3g} to {fall[1]:.3g}", mean(fall)
        signs[text] = max(row.get("step", 0) for row in batches if (row["reward/mean"] or 0) > middle) + 1
    if len(signs) == (fall is not None) and (fall is None or fall[1] >= fall[0] / 2):
        return [], inf
    rate = max(_values(trainer, "lr"), default=0.0)
    largest = f" (at most {rate:.2g} so far)" if rate else ""
    onset = min(signs.values())
    # Checkpoint n follows the update of step n - 1.
    saved = max((step for step in checkpoints if step <= onset), default=None)
    resume = f"resume from checkpoint {saved} (ckpt.resume_step)"
    if saved is None:
        resume = f"start again: there is no checkpoint of step {onset:.0f} or before"
    return [f"training is unstable: {', '.join(signs)}; lower optim.lr{largest}, and {resume}"], onset


def _hacking(orchestrator: Sequence[Row], batches: Sequence[Row]) -> Iterator[str]:
    """The reward rises while an evaluation or a metric of the environment falls."""
    if (rise := _change(_values(batches, "reward/mean"))) is None or rise[1] <= rise[0]:
        return
    names = {name for row in orchestrator for name in row if _measures_quality(name)}
    for name in sorted(names, key=lambda name: (not name.startswith(("eval/", "val/")), name)):
        values = _values(orchestrator, name)
        change = _change(values) if all(0 <= value <= 1 for value in values) else None
        if change is not None and change[1] < change[0]:
            condition = f" if a lower {name} is worse" if name.startswith("metrics/") else ""
            yield (
                f"the reward rose from {rise[0]:.3g} to {rise[1]:.3g} while {name} fell from {change[0]:.3g} to "
                f"{change[1]:.3g}: read the rollouts with the highest reward in "
                f"samples/step_{batches[-1]['step']}.jsonl; the reward may be hacked{condition}"
            )
            return


def _measures_quality(name: str) -> bool:
    is_evaluation = name.startswith(("eval/", "val/")) and name.endswith("/reward/mean") and "/by/" not in name
    return is_evaluation or (name.startswith("metrics/") and not _LOWER_IS_BETTER.search(name))


def _collapse(trainer: Sequence[Row], batches: Sequence[Row]) -> Iterator[str]:
    """The entropy is gone, although the best rollouts still have a higher reward than the others."""
    entropies, rewards = _ends(_values(trainer, "entropy")), _values(batches, "reward/mean")
    if not entropies or not rewards or mean(entropies[1]) > _COLLAPSED * mean(entropies[0]):
        return
    best, recent = max(_values(batches, "reward/max"), default=0.0), mean(rewards[-_RECENT:])
    change = _change(rewards[len(rewards) // 2 :])
    if recent < _SATURATED * best and (change is None or change[1] < change[0]):
        yield (
            f"the entropy collapsed from {mean(entropies[0]):.3g} to {mean(entropies[1]):.3g} nats, and the reward "
            f"stays at {recent:.3g}: rollouts are alike; lower optim.lr, add loss.kl, or raise sampling.temperature"
        )


def _values(rows: Sequence[Row], name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [float(value) for value in values if isinstance(value, int | float) and isfinite(value)]


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return the first and the last third, at most `_RECENT` values each; None if there are too few."""
    if len(values) < _MIN_POINTS:
        return None
    size = min(_RECENT, len(values) // 3)
    return values[:size], values[-size:]


def _change(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the means at both ends if they differ significantly."""
    ends = _ends(values)
    return _differ(*ends) if ends is not None else None


def _differ(first: Sequence[float], last: Sequence[float]) -> tuple[float, float] | None:
    error = sqrt(variance(first) / len(first) + variance(last) / len(last))
    is_different = abs(mean(last) - mean(first)) > max(_MIN_CHANGE, _NUM_ERRORS * error)
    return (mean(first), mean(last)) if is_different else None


def _fall(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the largest mean of consecutive values and the mean of the last ones, if it fell significantly.

    A peak of three values counts only if the last mean is below half of it.
    """
    if (ends := _ends(values)) is None:
        return None
    last = ends[1]
    for size, share in ((len(last), 1.0), (min(3, len(last)), 0.5)):
        best = max((values[i : i + size] for i in range(len(values) - size + 1)), key=mean)
        if mean(last) < share * mean(best) and (found := _differ(best, last)) is not None:
            return found
    return None
