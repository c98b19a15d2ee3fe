"""Checks the files of a run with faults: exactly once (I3), whole artifacts (I4), bound and version tags (I1, I5).

Manifests list what was shipped, ledgers what was drawn and dropped; each branch's ledger begins with the state of the
checkpoint that it rolled back to. The tokens of a contract engine depend on the version that sampled them.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.storage.artifact import MANIFEST
from prime_rl.storage.batch import ROWS_FILE, Batch, read_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from tests.chaos import letters
from tests.chaos.cases import INTERVAL, STEPS, Plan


@dataclass
class CheckResult:
    """Problems of a run.

    Attributes:
        lost: stream positions that were neither trained on nor dropped for a reason; steps without a batch.
        repeated: positions or rollouts that occur twice.
        bound_broken: batches with a token older than the bound.
        broken: other problems.
        final_reward: mean of the last batches.
        batches: content hash of each batch.
        weights: content hash of the last version.
    """

    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    bound_broken: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    final_reward: float | None = None
    batches: list[str] = field(default_factory=list)
    weights: str | None = None

    @property
    def problems(self) -> list[str]:
        """All problems."""
        return [*self.lost, *self.repeated, *self.bound_broken, *self.broken]


LAST = 8
"""Batches whose mean is the final reward."""


def check(paths: RunPaths, plan: Plan, group: int, sampling_seed: int) -> CheckResult:
    """Check a run that has ended.

    Args:
        paths: of the run.
        plan: of the run.
        group: rollouts per group.
        sampling_seed: seed of its requests.
    """
    result = CheckResult()
    manifests = _read_manifests(paths, STEPS, result)
    _check_positions(paths, manifests, result)
    for step, manifest in manifests.items():
        if step - manifest["min_version"] > plan.async_level:
            result.bound_broken.append(f"batch {step} holds tokens of version {manifest['min_version']}")
        if (paths.rollouts(step) / ROWS_FILE).exists():
            _check_batch(paths, step, manifest, plan, group, sampling_seed, result)
        elif plan.keep_last is None and step >= INTERVAL:  # the trainer deletes those before the first checkpoint
            result.broken.append(f"the rows of batch {step} are gone")
    _check_metrics(paths, plan, result)
    _check_progress(paths, plan, manifests, result)
    return result


def _in_short(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def _read_manifests(paths: RunPaths, steps: int, result: CheckResult) -> dict[int, dict[str, Any]]:
    manifests, missing = {}, []
    for step in range(steps):
        try:
            manifests[step] = json.loads((paths.rollouts(step) / MANIFEST).read_text())
        except (OSError, ValueError):
            missing.append(step)
    if missing:
        result.lost.append(f"no manifest of batches {_in_short(missing)}")
    branches = [manifest["branch"] for manifest in manifests.values()]
    if branches != sorted(branches):
        result.broken.append(f"branches go back: {branches}")
    result.batches = [manifest["hash"] for manifest in manifests.values()]
    return manifests


def _check_positions(paths: RunPaths, manifests: dict[int, dict[str, Any]], result: CheckResult) -> None:
    """Follow the surviving branches: every position that has ended was shipped once, or dropped once."""
    shipped = Counter(group for manifest in manifests.values() for group in manifest["group_ids"])
    result.repeated += [f"position {group} was shipped {count} times" for group, count in shipped.items() if count > 1]
    dropped_before, dropped, ended, is_open = set[int](), set[int](), set[int](), set[int]()
    first = drawn = 0
    first_of = {manifest["branch"]: step for step, manifest in reversed(manifests.items())}
    for branch, first in sorted(first_of.items()):
        records = _read_ledger(paths, branch, result)
        if not records:
            return
        base = _ended(records[0].get("base"))
        before = {g for step, manifest in manifests.items() if step < first for g in manifest["group_ids"]}
        result.lost += [f"branch {branch} lacks {g}, which ended before" for g in sorted(before - base)]
        unnamed = sorted(base - before - dropped_before)
        result.lost += [f"position {g} ended before branch {branch}, neither shipped nor dropped" for g in unnamed]
        dropped_here = {record["group_id"] for record in records if record["record"] == "dropped"}
        again = sorted((dropped_here & base) | (dropped_here & {g for g in shipped if g in before}))
        result.repeated += [f"position {g} had ended, and was dropped again in branch {branch}" for g in again]
        dropped_before |= dropped_here
        ended = base | dropped_here | {g for r in records if r["record"] == "shipped" for g in r["group_ids"]}
        dropped = (base - before) | dropped_here
        start = (records[0].get("base") or {"positions": {"cursor": 0}})["positions"]["cursor"]
        drawn = max((r["group_id"] + 1 for r in records if r["record"] == "drawn"), default=start)
        is_open = {r["group_id"] for r in records if r["record"] in ("drawn", "issued")} | _open(records[0].get("base"))
    later = {g for step, manifest in manifests.items() if step >= first for g in manifest["group_ids"]}
    result.repeated += [f"position {g} was dropped and shipped" for g in sorted(dropped & set(shipped))]
    known = set(shipped) | dropped | is_open
    result.lost += [f"position {g} has disappeared" for g in sorted(set(range(drawn)) - known)]
    result.lost += [f"position {g} was shipped, but its ledger lacks it" for g in sorted(later - ended - is_open)]


def _read_ledger(paths: RunPaths, branch: int, result: CheckResult) -> list[dict[str, Any]]:
    """The records of a branch, also if a rollback archived them; without an incomplete last line."""
    name = paths.ledger(branch).name
    found = [paths.ledger(branch), *sorted(paths.abandoned_dir.glob(f"branch_*/ledger/{name}"))]
    there = [file for file in found if file.exists()]
    if len(there) != 1:
        result.broken.append(f"branch {branch} has {len(there)} ledgers")
        return []
    lines = there[0].read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _ended(base: dict[str, Any] | None) -> set[int]:
    """The positions that had ended when a branch began."""
    return set() if base is None else set(range(base["positions"]["cursor"])) - _open(base)


def _open(base: dict[str, Any] | None) -> set[int]:
    return set() if base is None else {item[0] for item in base["positions"]["open"]}


def _check_batch(
    paths: RunPaths,
    step: int,
    manifest: dict[str, Any],
    plan: Plan,
    group: int,
    sampling_seed: int,
    result: CheckResult,
) -> None:
    directory = paths.rollouts(step)
    if content_hash(hash_tensors(directory)) != manifest["hash"]:
        result.broken.append(f"batch {step} differs from its manifest")
        return
    batch, _ = read_batch(directory, step)
    pairs = list(zip(batch.sample_group.tolist(), batch.sample_rollout.tolist(), strict=True))
    result.repeated += [f"batch {step} holds rollout {p} {n} times" for p, n in Counter(pairs).items() if n > 1]
    wanted = {(g, rollout) for g in manifest["group_ids"] for rollout in range(group)}
    result.lost += [f"batch {step} lacks rollout {pair}" for pair in sorted(wanted - set(pairs))]
    sampled = batch.versions[batch.versions >= 0]
    if len(sampled) and step - int(sampled.min()) > plan.async_level:
        result.bound_broken.append(f"batch {step} holds tokens of version {sampled.min()}, unlike its manifest")
    if plan.engine == "contract":
        wrong = [pair for pair, seen, due in _completions(batch, sampling_seed) if seen != due]
        result.broken += [f"batch {step}: rollout {pair} differs from what its versions sample" for pair in wrong]


def _completions(batch: Batch, sampling_seed: int) -> Iterable[tuple[tuple[int, int], list[int], list[int]]]:
    """Yield each rollout with its completion and the expected one for its prompt, seed and versions."""
    starts = np.cumsum(batch.seq_lens) - batch.seq_lens
    for index, (start, length) in enumerate(zip(starts.tolist(), batch.seq_lens.tolist(), strict=True)):
        tokens, versions = batch.tokens[start : start + length], batch.versions[start : start + length]
        sampled = versions >= 0
        pair = int(batch.sample_group[index]), int(batch.sample_rollout[index])
        seed = letters.rollout_seed(sampling_seed, *pair)
        yield (
            pair,
            tokens[sampled].tolist(),
            letters.complete(tokens[~sampled].tolist(), seed, versions[sampled].tolist()),
        )


def _check_metrics(paths: RunPaths, plan: Plan, result: CheckResult) -> None:
    trained = [line["step"] for line in _lines(paths.metrics("trainer"))]
    if trained != list(range(STEPS)):
        counts = Counter(trained)
        missing = _in_short([step for step in range(STEPS) if not counts[step]]) or "none"
        twice = _in_short([step for step, count in counts.items() if count > 1]) or "none"
        found = f"{len(trained)} steps; missing: {missing}; twice: {twice}"
        result.broken.append(f"metrics/trainer.jsonl contains {found}")
    shipped = _lines(paths.metrics("orchestrator"))
    if again := [step for step, count in Counter(line["step"] for line in shipped).items() if count > 1]:
        result.broken.append(f"metrics/orchestrator.jsonl contains steps {again} more than once")
    last = [line["reward/mean"] for line in shipped if line["step"] >= STEPS - LAST]
    result.final_reward = float(np.mean(last)) if last else None


def _check_progress(paths: RunPaths, plan: Plan, manifests: dict[int, dict[str, Any]], result: CheckResult) -> None:
    """Compare the trainer's counters in the last checkpoint with the surviving batches."""
    file = paths.checkpoint(STEPS) / "trainer" / MANIFEST
    try:
        progress = json.loads(file.read_text())["progress"]
        result.weights = json.loads((paths.weights(STEPS) / MANIFEST).read_text())["hash"]
    except (OSError, ValueError, KeyError) as error:
        result.broken.append(f"the run's last checkpoint or version is missing: {error}")
        return
    due = {
        "step": STEPS,
        "samples": sum(manifest["sequences"] for manifest in manifests.values()),
        "problems": sum(len(manifest["group_ids"]) for manifest in manifests.values()),
    }
    if (found := {key: progress[key] for key in due}) != due:
        result.broken.append(f"the trainer has trained on {found}, the surviving batches are {due}")


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]
