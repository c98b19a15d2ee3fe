"""`synthesize`: a served model plays environments, and what it said becomes training data for `sft`.

Rollouts are on disk as they finish (`rollouts.jsonl`, as for an evaluation); the samples are made of them at the end,
and made anew when only the filter has changed. A group that failed gives none.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from loguru import logger
from rich.console import Console
from rich.table import Table

from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.evals.rows import ExampleRow, RolloutRow
from prime_rl.orchestrator.evals.sessions import first_error, look, open_session, play_or_resume
from prime_rl.orchestrator.evals.workloads import Play, plan
from prime_rl.run.paths import RunPaths

SAMPLES = "samples.jsonl"


def synthesize(config: SynthesizeConfig) -> Path:
    """Play the environments of `config` and write the samples; goes on where an earlier call stopped.

    Returns:
        The file of samples, one JSON object a line: `messages` and `tools` as chat templates read them, and whence
        they come: `env`, `example`, `reward`.

    Raises:
        ConfigError: an environment does not load.
        RunError: a server cannot be reached or refuses everything, or no sample is left.
    """
    plays = plan(config.env, [], config.sampling, config.num_examples, config.rollouts_per_example)
    played = uvloop.run(_play(config, plays))
    path = RunPaths(config.output_dir).synthesis_dir / SAMPLES
    counts = write_samples(path, played, config.min_reward, config.keep_truncated)
    table = Table("environment", "samples", "failed examples", "truncated", "reward too low")
    for name, rows in played.items():
        count = counts[name]
        failed = sum(row.failure is not None for row in rows)
        table.add_row(name, *(str(number) for number in (count["kept"], failed, count["truncated"], count["low"])))
    Console(markup=False).print(table)
    kept = sum(count["kept"] for count in counts.values())
    if not kept:
        error = next((error for rows in played.values() if (error := first_error(rows))), None)
        raise RunError(f"no sample is left{f'; the first failure: {error}' if error else ' by the filters'}")
    logger.info("{} samples are in {}; train on them by `uv run sft --data.name {}`", kept, path, path)
    return path


def write_samples(
    path: Path, played: dict[str, Sequence[ExampleRow]], min_reward: float | None, keep_truncated: bool
) -> dict[str, Counter[str]]:
    """Write the samples of all environments into one file, which is whole or as it was before.

    Args:
        path: the file.
        played: rows by environment.
        min_reward: leave out rollouts below it.
        keep_truncated: keep rollouts that were cut.

    Returns:
        By environment, how many rollouts were `kept`, `truncated` or of too `low` a reward.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in played}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        for name, rows in played.items():
            for example, rollout in _rollouts(rows):
                verdict = _verdict(rollout, min_reward, keep_truncated)
                counts[name][verdict] += 1
                if verdict == "kept":
                    file.write(msgspec.json.encode(_sample(name, example, rollout)) + b"\n")
    temporary.replace(path)
    return counts


async def _play(config: SynthesizeConfig, plays: Sequence[Play]) -> dict[str, Sequence[ExampleRow]]:
    parent = RunPaths(config.output_dir).synthesis_dir
    played: dict[str, Sequence[ExampleRow]] = {}
    async with open_session(config, plays, config.split) as session:
        loaded = await look(config) if session.api == "generate" else None
        for item, pool in session.pools:
            _, played[item.name] = await play_or_resume(session, item, pool, loaded, parent)
    return played


def _rollouts(rows: Sequence[ExampleRow]) -> Iterator[tuple[int, RolloutRow]]:
    return ((row.example, rollout) for row in rows for rollout in row.rollouts)


def _verdict(rollout: RolloutRow, min_reward: float | None, keep_truncated: bool) -> str:
    if rollout.is_truncated and not keep_truncated:
        return "truncated"
    return "low" if min_reward is not None and rollout.reward < min_reward else "kept"


def _sample(env: str, example: int, rollout: RolloutRow) -> dict[str, Any]:
    sample = {"messages": rollout.messages, **({"tools": rollout.tools} if rollout.tools else {})}
    return sample | {"env": env, "example": example, "reward": rollout.reward}
