"""Statistics of evaluated examples: pass rates, majority votes, confidence intervals, breakdowns."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from prime_rl.core.pass_at_k import REWARD_TOLERANCE, pass_at_k, pass_hat_k
from prime_rl.evaluation.eval_results import ExampleRow, RolloutRow
from prime_rl.rollouts.rendering.messages import last_reply

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)

Z_95 = 1.959964
"""0.975 quantile of the normal distribution."""

_MAX_VALUES = 50
"""Largest number of values of a column in a breakdown; the most frequent ones are reported."""
_MAX_VALUE_CHARS = 40
_TAIL_CHARS = 20_000
"""An answer is within so many characters of the end of a reply."""

Summary = dict[str, float | None]
Group = Sequence[RolloutRow]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return float(np.mean(values)) if len(values) else None


def passes(rollout: RolloutRow, threshold: float) -> bool:
    """Return whether the reward of a rollout is at least `threshold`."""
    return rollout.reward >= threshold - REWARD_TOLERANCE


def pass_rates(groups: Sequence[Group], threshold: float, pass_at: Sequence[int] = ()) -> Summary:
    """Return pass@k with its confidence interval, and pass^k for k > 1.

    `pass_at` are the k, by default the powers of two; those above the number of rollouts n are left out.
    """
    if not groups:
        return {}
    smallest = min(map(len, groups))
    counts = [(len(group), sum(passes(rollout, threshold) for rollout in group)) for group in groups]
    rates: Summary = {}
    for k in (k for k in pass_at or PASS_AT if k <= smallest):
        named = [(f"pass@{k}", pass_at_k)] + ([(f"pass^{k}", pass_hat_k)] if k > 1 else [])
        for name, estimate in named:
            rates[name] = rate = float(np.mean([estimate(n, c, k) for n, c in counts]))
            rates[f"{name}/ci95_low"], rates[f"{name}/ci95_high"] = wilson_interval(rate, len(groups))
    return rates


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a mean of `count` independent values between 0 and 1.

    Wilson 1927. Exact enough for single rollouts. With several rollouts per example, the means of the examples vary
    less than the binomial distribution assumes, so the interval is too wide rather than too narrow.
    """
    spread = Z_95**2 / count
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(max(0.0, rate * (1 - rate) / count + spread / (4 * count))) * Z_95 / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def majority_vote(groups: Sequence[Group], threshold: float, pattern: str) -> Summary:
    """Return maj@n: the share of examples whose most frequent answer is correct.

    The answer of a rollout is the last match of `pattern` in its last reply (group 1, if there is one). Its rollouts
    say whether an answer is correct. Of several most frequent answers each counts in part; no answer is incorrect.
    """
    if not groups:
        return {}
    expression = re.compile(pattern)
    votes = [
        _vote([(_answer(rollout, expression), passes(rollout, threshold)) for rollout in group]) for group in groups
    ]
    return {f"maj@{min(map(len, groups))}": mean(votes)}


def breakdown(rows: Iterable[ExampleRow], threshold: float) -> Summary:
    """Return number of examples, mean reward and pass@1 for each value of each column of the examples."""
    values: dict[str, dict[str, list[Group]]] = {}
    for row in rows:
        for column, value in row.columns.items() if row.rollouts else ():
            label = value.replace("/", "_")[:_MAX_VALUE_CHARS]
            values.setdefault(column, {}).setdefault(label, []).append(row.rollouts)
    summary: Summary = {}
    for column, groups_of in sorted(values.items()):
        most_frequent = sorted(groups_of, key=lambda label: (-len(groups_of[label]), label))[:_MAX_VALUES]
        for label in sorted(most_frequent):
            groups, name = groups_of[label], f"by/{column}/{label}"
            summary[f"{name}/examples"] = len(groups)
            summary[f"{name}/reward/mean"] = mean(example_means(groups))
            summary[f"{name}/pass@1"] = pass_rates(groups, threshold, [1])["pass@1"]
    return summary


def example_means(groups: Sequence[Group]) -> list[float]:
    """Return the mean reward of each example."""
    return [float(np.mean([rollout.reward for rollout in group])) for group in groups]


def _answer(rollout: RolloutRow, expression: re.Pattern[str]) -> str | None:
    text = last_reply(rollout.messages)[-_TAIL_CHARS:]
    answer = None
    for match in expression.finditer(text):
        answer = match.group(1 if expression.groups else 0)
    return None if answer is None else answer.strip()


def _vote(answers: Sequence[tuple[str | None, bool]]) -> float:
    counts = Counter(answer for answer, _ in answers if answer is not None)
    if not counts:
        return 0.0
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    correct: Mapping[str, list[bool]] = {a: [passed for other, passed in answers if other == a] for a in best}
    return float(np.mean([np.mean(passed) for passed in correct.values()]))
