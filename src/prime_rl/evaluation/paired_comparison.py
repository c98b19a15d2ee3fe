"""`eval --compare A B`: compares two evaluations example by example."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from prime_rl.core.errors import ConfigError
from prime_rl.evaluation.eval_results import ROLLOUTS, SETTINGS, ExampleRow
from prime_rl.evaluation.eval_statistics import Z_95

_FILE_COLUMNS = 160
_PERMUTATIONS = 10_000
_SEED = 0
_EXPECTED = {"model", "version", "weights", "servers", "api"}
"""Settings in which two evaluations differ on purpose."""


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two evaluations of one environment. Rewards are means over the rollouts of an example.

    Attributes:
        env: name of the environment.
        examples: number of examples that both have finished.
        before: mean reward of A.
        after: mean reward of B.
        low, high: 95 % confidence interval of the mean difference B - A, over examples.
        p_value: of a difference at least as large if A and B were exchangeable for each example.
        better, worse: number of examples with a higher and a lower reward in B.
        differences: settings that differ, except model and servers.
    """

    env: str
    examples: int
    before: float
    after: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int
    differences: tuple[str, ...]


def compare(a: Path, b: Path) -> list[PairedComparison]:
    """Compare two results: result files, their directories, or directories with several environments.

    Raises:
        ConfigError: one has no results, they have no environment or example in common, or two results of one
            environment.
    """
    if (a / ROLLOUTS).is_file() or a.is_file() or (b / ROLLOUTS).is_file() or b.is_file():
        return [_compare(a.resolve().parent.name, _result_file(a), _result_file(b))]
    before, after = _by_environment(a), _by_environment(b)
    if not (common := sorted(before.keys() & after.keys())):
        names = [f"{path} ({', '.join(sorted(found))})" for path, found in ((a, before), (b, after))]
        raise ConfigError(f"{' and '.join(names)} share no environment")
    return [_compare(env, before[env], after[env]) for env in common]


def print_comparisons(comparisons: Sequence[PairedComparison]) -> None:
    """Print one line per environment, and the settings that differ."""
    table = Table("environment", "examples", "A", "B", "B - A", "95 % interval", "p", "better", "worse")
    for each in comparisons:
        table.add_row(
            each.env, str(each.examples), f"{each.before:.3f}", f"{each.after:.3f}",
            f"{each.after - each.before:+.3f}", f"{each.low:+.3f} to {each.high:+.3f}", f"{each.p_value:.4f}",
            str(each.better), str(each.worse),
        )  # fmt: skip
    console = Console(markup=False, width=None if Console().is_terminal else _FILE_COLUMNS)
    console.print(table)
    for each in comparisons:
        if each.differences:
            console.print(f"warning: the settings of {each.env} differ: {', '.join(each.differences)}", soft_wrap=True)


def _compare(env: str, a: Path, b: Path) -> PairedComparison:
    before, after = _rewards(a), _rewards(b)
    if not (common := sorted(before.keys() & after.keys())):
        raise ConfigError(f"{a} and {b} have no finished example in common")
    first = np.array([before[example] for example in common])
    second = np.array([after[example] for example in common])
    difference = second - first
    mean = float(difference.mean())
    half = Z_95 * float(difference.std(ddof=1)) / len(common) ** 0.5 if len(common) > 1 else float("nan")
    settings = _settings(a), _settings(b)
    keys = sorted((settings[0].keys() | settings[1].keys()) - _EXPECTED)
    return PairedComparison(
        env, len(common), float(first.mean()), float(second.mean()), mean - half, mean + half,
        _sign_flip_p_value(difference), int((difference > 0).sum()), int((difference < 0).sum()),
        tuple(key for key in keys if settings[0].get(key) != settings[1].get(key)),
    )  # fmt: skip


def _sign_flip_p_value(difference: NDArray[np.float64]) -> float:
    """Return the share of random sign flips whose mean is at least as far from 0; seeded, counts the observed one."""
    rng, extreme = np.random.default_rng(_SEED), 1
    observed = abs(float(difference.sum()))
    changed = difference[difference != 0]  # a flip of 0 changes nothing
    for _ in range(_PERMUTATIONS):
        signs = rng.integers(0, 2, len(changed)) * 2 - 1
        extreme += abs(float(changed @ signs)) >= observed - 1e-12
    return extreme / (_PERMUTATIONS + 1)


def _rewards(path: Path) -> dict[int, float]:
    decode = msgspec.json.Decoder(ExampleRow).decode
    try:
        rows = [decode(line) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a file of evaluated examples: {error}") from None
    latest = {row.example: row for row in rows}  # the last row of an example counts
    return {
        example: float(np.mean([rollout.reward for rollout in row.rollouts]))
        for example, row in latest.items()
        if row.rollouts
    }


def _settings(path: Path) -> Mapping[str, Any]:
    file = path.with_name(SETTINGS)
    return json.loads(file.read_text()) if file.is_file() else {}


def _result_file(path: Path) -> Path:
    file = path / ROLLOUTS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} has no {ROLLOUTS}; name one evaluation, evals/<environment>/<digest>")
    return file


def _by_environment(directory: Path) -> dict[str, Path]:
    """Return the result file of each environment below an output directory, or its `evals`."""
    root = directory / "evals" if (directory / "evals").is_dir() else directory
    found: dict[str, Path] = {}
    for file in sorted(root.glob(f"*/*/{ROLLOUTS}")):
        env = file.parent.parent.name
        if env in found:
            raise ConfigError(f"{root / env} has several evaluations; name one of {found[env].parent}, {file.parent}")
        found[env] = file
    if not found:
        raise ConfigError(f"{directory} has no results of `eval` (evals/<environment>/<digest>/{ROLLOUTS})")
    return found
