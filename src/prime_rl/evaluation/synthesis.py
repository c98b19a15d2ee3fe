"""The `synthesize` command: runs environments on a served model and writes the rollouts as training data for `sft`.

Finished examples are stored as for an evaluation. The samples are made from them at the end, so another filter needs
no new rollouts.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from loguru import logger
from rich.console import Console
from rich.table import Table

from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.core.errors import RunError
from prime_rl.evaluation.eval_plan import plan_tasks
from prime_rl.evaluation.eval_results import ExampleRow, first_error
from prime_rl.evaluation.eval_session import open_session
from prime_rl.storage.paths import RunPaths

SAMPLES = "samples.jsonl"


def synthesize(config: SynthesizeConfig) -> Path:
    """Run the environments of `config` and write the samples. The same call resumes an interrupted one.

    Returns:
        The file of samples, one JSON object per line: `messages` and `tools` as chat templates read them, and their
        origin: `env`, `example`, `reward`.

    Raises:
        ConfigError: an environment does not load.
        RunError: a server cannot be reached or refuses everything, an environment has several trainable agents, or no
            sample remains.
    """
    folder = RunPaths(config.output_dir).synthesis_dir
    tasks = plan_tasks(config.env, [], config.sampling, config.num_examples, config.rollouts_per_example)

    async def run() -> dict[str, Sequence[ExampleRow]]:
        rows: dict[str, Sequence[ExampleRow]] = {}
        async with open_session(config, tasks, config.split) as session:
            loaded = await session.loaded_policy()
            for task, pool in session.pools:
                _, rows[task.name] = await session.run_or_resume(task, pool, loaded, folder)
        return rows

    rows_by_env = uvloop.run(run())
    path = folder / SAMPLES
    counts = write_samples(path, rows_by_env, config.min_reward, config.keep_truncated)
    table = Table("environment", "samples", "failed examples", "truncated", "reward too low")
    for name, rows in rows_by_env.items():
        count = counts[name]
        failed = sum(row.failure is not None for row in rows)
        table.add_row(name, *(str(number) for number in (count["kept"], failed, count["truncated"], count["low"])))
    Console(markup=False).print(table)
    kept = sum(count["kept"] for count in counts.values())
    if not kept:
        error = next((error for rows in rows_by_env.values() if (error := first_error(rows))), None)
        reason = (
            f"the first failure: {error}" if error else "all were filtered out; lower min_reward, or set keep_truncated"
        )
        raise RunError(f"no sample is left; {reason}")
    logger.info("{} samples are in {}; train on them with `uv run sft --data.name {}`", kept, path, path)
    return path


def write_samples(
    path: Path, rows_by_env: dict[str, Sequence[ExampleRow]], min_reward: float | None, keep_truncated: bool
) -> dict[str, Counter[str]]:
    """Write the samples of all environments into one file, atomically.

    Returns:
        By environment, how many rollouts were `kept`, `truncated` or had too `low` a reward.

    Raises:
        RunError: an environment has several trainable agents.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in rows_by_env}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        for name, rows in rows_by_env.items():
            for example, rollout in ((row.example, rollout) for row in rows for rollout in row.rollouts):
                if any("agent" in message for message in rollout.messages):
                    raise RunError(
                        f"environment {name!r} has several trainable agents, and a sample is the conversation of one; "
                        "let only one be trainable, or train with `rl`"
                    )
                if rollout.is_truncated and not keep_truncated:
                    counts[name]["truncated"] += 1
                elif min_reward is not None and rollout.reward < min_reward:
                    counts[name]["low"] += 1
                else:
                    counts[name]["kept"] += 1
                    tools = {"tools": rollout.tools} if rollout.tools else {}
                    origin = {"env": name, "example": example, "reward": rollout.reward}
                    file.write(msgspec.json.encode({"messages": rollout.messages, **tools, **origin}) + b"\n")
    temporary.replace(path)
    return counts
