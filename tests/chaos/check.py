"""What a disturbed run has left behind, judged from files alone: is it what an undisturbed one leaves?

I3: manifests say what was shipped, ledgers what was drawn and dropped; each branch's ledger begins with the state of
the checkpoint that it went back to. I4: every batch is what its manifest says. I1, I5: the tokens of a contract
engine tell which version must have sampled them.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.run.artifact import MANIFEST
from prime_rl.run.batch import ROWS_FILE, Batch, read_batch
from prime_rl.run.paths import RunPaths
from prime_rl.run.tensors import content_hash, hash_tensors
from tests.chaos import letters
from tests.chaos.cases import INTERVAL, STEPS, Plan


@dataclass
class Verdict:
    """What is wrong with a run; nothing if all is empty.

    Attributes:
        lost: stream positions that ended without being trained on or dropped under a name; steps without a batch.
        repeated: positions, or rollouts, that are there twice.
        bound_broken: batches with a token older than the bound.
        broken: other things, in words.
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
        """All of it."""
        return [*self.lost, *self.repeated, *self.bound_broken, *self.broken]


LAST = 8
"""Batches whose mean is the final reward."""


def check(paths: RunPaths, plan: Plan, group: int, sampling_seed: int) -> Verdict:
    """Judge a run that has come to its end.

    Args:
        paths: of the run.
        plan: what it was.
        group: rollouts of a group.
        sampling_seed: of its requests.
    """
    verdict = Verdict()
    manifests = _read_manifests(paths, STEPS, verdict)
    _check_positions(paths, manifests, verdict)
    for step, manifest in manifests.items():
        if step - manifest["min_version"] > plan.async_level:
            verdict.bound_broken.append(f"batch {step} holds tokens of version {manifest['min_version']}")
        if (paths.rollouts(step) / ROWS_FILE).exists():
            _check_batch(paths, step, manifest, plan, group, sampling_seed, verdict)
        elif plan.keep_last is None and step >= INTERVAL:  # the trainer deletes those before the first checkpoint
            verdict.broken.append(f"the rows of batch {step} are gone")
    _check_metrics(paths, plan, verdict)
    _check_progress(paths, plan, manifests, verdict)
    return verdict


def _in_short(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def _read_manifests(paths: RunPaths, steps: int, verdict: Verdict) -> dict[int, dict[str, Any]]:
    manifests, missing = {}, []
    for step in range(steps):
        try:
            manifests[step] = json.loads((paths.rollouts(step) / MANIFEST).read_text())
        except (OSError, ValueError):
            missing.append(step)
    if missing:
        verdict.lost.append(f"no manifest of batches {_in_short(missing)}")
    branches = [manifest["branch"] for manifest in manifests.values()]
    if branches != sorted(branches):
        verdict.broken.append(f"branches go back: {branches}")
    verdict.batches = [manifest["hash"] for manifest in manifests.values()]
    return manifests


def _check_positions(paths: RunPaths, manifests: dict[int, dict[str, Any]], verdict: Verdict) -> None:
    """Follow the surviving line: every position that has ended was shipped once, or dropped once."""
    shipped = Counter(group for manifest in manifests.values() for group in manifest["group_ids"])
    verdict.repeated += [f"position {group} was shipped {count} times" for group, count in shipped.items() if count > 1]
    told_dropped, dropped, ended, is_open = set[int](), set[int](), set[int](), set[int]()
    first = drawn = 0
    first_of = {manifest["branch"]: step for step, manifest in reversed(manifests.items())}
    for branch, first in sorted(first_of.items()):
        records = _read_ledger(paths, branch, verdict)
        if not records:
            return
        base = _ended(records[0].get("base"))
        before = {g for step, manifest in manifests.items() if step < first for g in manifest["group_ids"]}
        verdict.lost += [f"branch {branch} does not know of {g}, which ended before" for g in sorted(before - base)]
        unnamed = sorted(base - before - told_dropped)
        verdict.lost += [f"position {g} ended before branch {branch}, neither shipped nor dropped" for g in unnamed]
        dropped_here = {record["group_id"] for record in records if record["record"] == "dropped"}
        again = sorted((dropped_here & base) | (dropped_here & {g for g in shipped if g in before}))
        verdict.repeated += [f"position {g} had ended, and was dropped again in branch {branch}" for g in again]
        told_dropped |= dropped_here
        ended = base | dropped_here | {g for r in records if r["record"] == "shipped" for g in r["group_ids"]}
        dropped = (base - before) | dropped_here
        drawn = _cursor(records)
        is_open = {r["group_id"] for r in records if r["record"] in ("drawn", "issued")} | _open(records[0].get("base"))
    later = {g for step, manifest in manifests.items() if step >= first for g in manifest["group_ids"]}
    verdict.repeated += [f"position {g} was dropped and shipped" for g in sorted(dropped & set(shipped))]
    known = set(shipped) | dropped | is_open
    verdict.lost += [f"position {g} was never seen again" for g in sorted(set(range(drawn)) - known)]
    verdict.lost += [f"position {g} was shipped, and its ledger does not know" for g in sorted(later - ended - is_open)]


def _read_ledger(paths: RunPaths, branch: int, verdict: Verdict) -> list[dict[str, Any]]:
    """The records of a branch, wherever a rewind has put them; a torn last line is left out."""
    name = paths.ledger(branch).name
    found = [paths.ledger(branch), *sorted(paths.abandoned_dir.glob(f"branch_*/ledger/{name}"))]
    there = [file for file in found if file.exists()]
    if len(there) != 1:
        verdict.broken.append(f"branch {branch} has {len(there)} ledgers")
        return []
    lines = there[0].read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _ended(base: dict[str, Any] | None) -> set[int]:
    """The positions that had ended in the state that a branch began with."""
    return set() if base is None else set(range(base["positions"]["cursor"])) - _open(base)


def _open(base: dict[str, Any] | None) -> set[int]:
    return set() if base is None else {item[0] for item in base["positions"]["open"]}


def _cursor(records: list[dict[str, Any]]) -> int:
    """Where the stream stands at the end of a ledger."""
    base = records[0].get("base")
    start = 0 if base is None else base["positions"]["cursor"]
    return max((r["group_id"] + 1 for r in records if r["record"] == "drawn"), default=start)


def _check_batch(
    paths: RunPaths, step: int, manifest: dict[str, Any], plan: Plan, group: int, sampling_seed: int, verdict: Verdict
) -> None:
    directory = paths.rollouts(step)
    if content_hash(hash_tensors(directory)) != manifest["hash"]:
        verdict.broken.append(f"batch {step} is not what its manifest says")
        return
    batch, _ = read_batch(directory, step)
    pairs = list(zip(batch.sample_group.tolist(), batch.sample_rollout.tolist(), strict=True))
    verdict.repeated += [f"batch {step} holds rollout {p} {n} times" for p, n in Counter(pairs).items() if n > 1]
    wanted = {(g, rollout) for g in manifest["group_ids"] for rollout in range(group)}
    verdict.lost += [f"batch {step} lacks rollout {pair}" for pair in sorted(wanted - set(pairs))]
    sampled = batch.versions[batch.versions >= 0]
    if len(sampled) and step - int(sampled.min()) > plan.async_level:
        verdict.bound_broken.append(f"batch {step} holds tokens of version {sampled.min()}, not as its manifest says")
    if plan.engine == "contract":
        wrong = [pair for pair, seen, due in _completions(batch, sampling_seed) if seen != due]
        verdict.broken += [f"batch {step}: rollout {pair} is not what its versions sample" for pair in wrong]


def _completions(batch: Batch, sampling_seed: int) -> Iterable[tuple[tuple[int, int], list[int], list[int]]]:
    """Yield each rollout with its completion, and with the one that its prompt, seed and versions must give."""
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


def _check_metrics(paths: RunPaths, plan: Plan, verdict: Verdict) -> None:
    trained = [line["step"] for line in _lines(paths.metrics("trainer"))]
    if trained != list(range(STEPS)):
        verdict.broken.append(f"metrics/trainer.jsonl tells of {_differences(trained, STEPS)}")
    shipped = _lines(paths.metrics("orchestrator"))
    twice = [step for step, count in Counter(line["step"] for line in shipped).items() if count > 1]
    if twice:
        verdict.broken.append(f"metrics/orchestrator.jsonl tells of steps {twice} more than once")
    last = [line["reward/mean"] for line in shipped if line["step"] >= STEPS - LAST]
    verdict.final_reward = float(np.mean(last)) if last else None


def _check_progress(paths: RunPaths, plan: Plan, manifests: dict[int, dict[str, Any]], verdict: Verdict) -> None:
    """The trainer's own count of what it has trained on, in the last checkpoint, is that of the surviving batches."""
    file = paths.checkpoint(STEPS) / "trainer" / MANIFEST
    try:
        progress = json.loads(file.read_text())["progress"]
        verdict.weights = json.loads((paths.weights(STEPS) / MANIFEST).read_text())["hash"]
    except (OSError, ValueError, KeyError) as error:
        verdict.broken.append(f"the run's last checkpoint or version is not there: {error}")
        return
    due = {
        "step": STEPS,
        "samples": sum(manifest["sequences"] for manifest in manifests.values()),
        "problems": sum(len(manifest["group_ids"]) for manifest in manifests.values()),
    }
    if (found := {key: progress[key] for key in due}) != due:
        verdict.broken.append(f"the trainer has trained on {found}, the surviving batches are {due}")


def _differences(steps: list[int], due: int) -> str:
    counts = Counter(steps)
    missing = [step for step in range(due) if not counts[step]]
    twice = [step for step, count in counts.items() if count > 1]
    return f"{len(steps)} steps; missing: {_in_short(missing) or 'none'}; twice: {_in_short(twice) or 'none'}"


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]
