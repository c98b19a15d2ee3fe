"""The `synthesize` command: writes rollouts as training data for `sft`, new ones of a served model or those of runs.

Finished examples of a served model are stored as for an evaluation. The samples are made from them at the end, so
another filter needs no new rollouts.
"""

import hashlib
import math
import shlex
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from loguru import logger

from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.core.entry_point import uv_run
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.json_lines import decode_object
from prime_rl.evaluation.eval_plan import EvalTask, check_installed, plan_tasks
from prime_rl.evaluation.eval_results import ROLLOUTS, ExampleRow, first_error
from prime_rl.evaluation.eval_session import open_session
from prime_rl.storage.file_locks import check_run_format
from prime_rl.storage.paths import RUN_FOLDER, RunPaths, step_of

SAMPLES = "samples.jsonl"
KEPT = "kept"
NoTrace = tuple[str, str]
"""An environment (of a damaged line, the file), and why a rollout or example of it cannot be read."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}


@dataclass(frozen=True, slots=True)
class Trace:
    """One rollout as a sample: its environment and example, and the rest as in `RolloutRow`."""

    env: str
    example: int | None
    reward: float
    is_truncated: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)

    def problem(self, min_reward: float | None, keep_truncated: bool) -> str | None:
        """Return why it is no sample; None if it is one."""
        if not all(isinstance(message.get("role"), str) for message in self.messages):
            return "damaged line"
        if any("agent" in message or message.get("role") not in _ROLES for message in self.messages):
            return "several agents"
        if self.is_truncated and not keep_truncated:
            return "truncated"
        if min_reward is not None and not self.reward >= min_reward:
            return "reward too low"
        if not any(message["role"] == "assistant" for message in self.messages):
            return "no reply"
        has_calls = any(message.get("tool_calls") for message in self.messages)
        if any(message["role"] == "tool" for message in self.messages) and not has_calls:
            return "calls not recorded"  # samples/ of an earlier release have the text of tool calls only
        return None

    def digest(self, only_prompt: bool = False) -> bytes:
        """Identify the conversation, or the messages before the first reply."""
        roles = [str(message.get("role")) for message in self.messages]
        end = roles.index("assistant") if only_prompt else None
        data = msgspec.json.encode([self.env if only_prompt else "", self.messages[:end], self.tools], order="sorted")
        return hashlib.blake2b(data, digest_size=16).digest()

    def line(self) -> bytes:
        """Return the sample: `messages` and `tools` as chat templates read them, and the origin."""
        tools = {"tools": self.tools} if self.tools else {}
        origin = {"env": self.env, "example": self.example, "reward": self.reward}
        return msgspec.json.encode({"messages": self.messages, **tools, **origin}) + b"\n"


def synthesize(config: SynthesizeConfig) -> Path:
    """Run the environments of `config`, or read the rollouts of `config.from_runs`, and write the samples.

    The same call resumes an interrupted one.

    Returns:
        The file of samples, one JSON object per line (`Trace.line`).

    Raises:
        ConfigError: an environment does not load, or a directory has no rollouts.
        RunError: a server cannot be reached or refuses everything, or no sample remains.
    """
    folder, limit = RunPaths(config.output_dir).synthesis_dir, config.max_per_example
    if config.from_runs:
        traces, error, limit = read_traces(map(Path, config.from_runs)), None, limit or 1
    else:
        rows = _sample(config, folder)
        traces = (trace for name, of_env in rows.items() for row in of_env for trace in _of_example(name, row))
        error = next((error for of_env in rows.values() if (error := first_error(of_env))), None)
    path = folder / SAMPLES
    counts = write_samples(path, traces, config.min_reward, config.keep_truncated, limit)
    for env, count in counts.items():
        others = ", ".join(f"{number} {reason}" for reason, number in count.most_common() if reason != KEPT and number)
        logger.info("{}: {} read, {} kept; not kept: {}", env, count.total(), count[KEPT], others or "none")
    kept = sum(count[KEPT] for count in counts.values())
    if not kept:
        total = sum(counts.values(), Counter[str]())
        reasons = ", ".join(f"{number} {reason}" for reason, number in total.most_common() if number)
        advice = "lower min_reward, or set keep_truncated"
        why = f"the first failure: {error}" if error else f"all were filtered out ({reasons}); {advice}"
        raise RunError(f"no sample is left; {why}")
    command = f"{uv_run()}sft --data.name {shlex.quote(str(path))}"
    logger.info("{} samples are in {}; train on them with `{}`", kept, path, command)
    return path


def _sample(config: SynthesizeConfig, folder: Path) -> dict[str, Sequence[ExampleRow]]:
    """Run the environments on the served model; return the rows by environment."""
    tasks = plan(config)

    async def run() -> dict[str, Sequence[ExampleRow]]:
        rows: dict[str, Sequence[ExampleRow]] = {}
        async with open_session(config, tasks, config.split) as session:
            loaded = await session.loaded_policy()
            for task, pool in session.pools:
                _, rows[task.name] = await session.run_or_resume(task, pool, loaded, folder)
        return rows

    return uvloop.run(run())


def _of_example(env: str, row: ExampleRow) -> Iterator[Trace | NoTrace]:
    if row.failure is not None:
        yield env, "failed example"
    for one in row.rollouts:
        yield Trace(env, row.example, one.reward, one.is_truncated, one.messages, one.tools)


def read_traces(folders: Iterable[Path]) -> Iterator[Trace | NoTrace]:
    """Yield the rollouts of runs, in the order of their steps, and of evaluations.

    Of a run that also evaluated, only the training is read: examples of an evaluation are not for training.
    Raises ConfigError if a folder has no rollouts.
    """
    for folder in folders:
        _check_source(folder)
        runs = [folder, *(run for run in sorted(folder.glob("run_*")) if RUN_FOLDER.fullmatch(run.name))]
        files = [file for run in runs for file in _steps(RunPaths(run).samples_dir)] or _steps(folder)
        if not files and not RunPaths(folder).run_toml.exists():
            files = [*sorted(folder.rglob(ROLLOUTS)), *sorted(folder.rglob("step_*.jsonl"))]
            if any(file.parent.name == "samples" for file in files):
                raise ConfigError(f"from = {folder} has runs below it; name their directories, separated by commas")
        if not files:
            raise ConfigError(
                f"from = {folder} has no samples/step_N.jsonl of a run and no {ROLLOUTS} of `eval`; name the "
                "output_dir of a run or of `eval`"
            )
        for file in files:
            yield from _read(file)


def _steps(folder: Path) -> list[Path]:
    """Return the files of a folder named by steps, in their order; the first ones may have been deleted."""
    steps = {step: file for file in folder.glob("step_*.jsonl") if (step := step_of(file.with_suffix(""))) is not None}
    if steps and (first := min(steps)):
        logger.warning("{} begins at step {}: earlier samples were deleted (num_kept_sample_files)", folder, first)
    return [steps[step] for step in sorted(steps)]


def _read(file: Path) -> Iterator[Trace | NoTrace]:
    """Read a file of samples/, or one of evals/ and synthesis/, where a line is an example with its rollouts."""
    env = (file.parent.parent if file.name == ROLLOUTS else file.parent).name
    examples = dict[int, ExampleRow]()  # the last row of an example counts
    with file.open("rb") as lines:
        for line in lines:
            row = decode_object(line, math.inf) or {}  # an example with many long rollouts is one line
            try:
                if "messages" not in row:
                    examples[row["example"]] = msgspec.convert(row, ExampleRow)
                    continue
                yield msgspec.convert({"is_truncated": False, "example": None, **row}, Trace)
            except (KeyError, msgspec.ValidationError):
                yield str(row.get("env", file)), "damaged line"
    for example in examples.values():
        yield from _of_example(env, example)


def _check_source(folder: Path) -> None:
    if not folder.exists():
        raise ConfigError(f"from = {folder} does not exist; name the output_dir of a run or of `eval`")
    check_run_format(RunPaths(folder))


def plan(config: SynthesizeConfig) -> list[EvalTask]:
    """Return the tasks, before anything is written; raises ConfigError."""
    for folder in config.from_runs:
        _check_source(Path(folder))
    check_installed(config.env)
    return plan_tasks(config.env, [], config.sampling, config.num_examples, config.rollouts_per_example)


def write_samples(
    path: Path,
    traces: Iterable[Trace | NoTrace],
    min_reward: float | None = None,
    keep_truncated: bool = False,
    limit: int | None = None,
) -> dict[str, Counter[str]]:
    """Write the samples of all environments into one file, atomically. Without any, an earlier file stays.

    Args:
        limit: best rollouts per example, without duplicates; of equal rewards the later ones. None writes all.

    Returns:
        By environment, how many rollouts were `kept`, or why not.
    """
    counts: dict[str, Counter[str]] = {}
    best: dict[tuple[str, int | None, bytes], list[tuple[float, int, bytes, Trace]]] = {}
    chosen = list[Trace]()
    for number, trace in enumerate(traces):
        if isinstance(trace, tuple):
            env, reason = trace
            counts.setdefault(env, Counter())[reason] += 1
            continue
        count, problem = counts.setdefault(trace.env, Counter()), trace.problem(min_reward, keep_truncated)
        if problem is not None:
            count[problem] += 1
        elif limit is None:
            chosen.append(trace)
        else:
            own = best.setdefault((trace.env, trace.example, trace.digest(only_prompt=True)), [])
            digest = trace.digest()
            if digest in (known[2] for known in own):
                count["duplicate"] += 1
                continue
            insort(own, (trace.reward, number, digest, trace))
            if len(own) > limit:
                count["not among the best"] += 1
                del own[0]
    seen = set[bytes]()
    for key in sorted(best, key=lambda key: (key[0], -1 if key[1] is None else key[1], key[2])):
        for *_, digest, kept in reversed(best[key]):
            counts[kept.env]["duplicate"] += digest in seen
            chosen += [] if digest in seen else [kept]
            seen.add(digest)
    for trace in chosen:
        counts[trace.env][KEPT] += 1
    if chosen:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            file.writelines(trace.line() for trace in chosen)
        temporary.replace(path)
    return counts
