"""Resolves a configuration to evaluation tasks: which environments and named benchmarks to run, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.rollouts.environment_id import check_environment, find_environment


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One environment and how it is evaluated: `rollouts` of each of `num_examples` examples, -1 takes all."""

    env: EvalEnvConfig
    sampling: SamplingConfig
    num_examples: int
    rollouts: int

    @property
    def name(self) -> str:
        """The environment's name in metrics and file names."""
        return self.env.label


def plan_tasks(
    environments: Sequence[EvalEnvConfig],
    benchmarks: Sequence[str],
    sampling: SamplingConfig,
    num_examples: int,
    rollouts: int,
    rollouts_per_benchmark: Sequence[int] = (),
    benchmark_data: Path | None = None,
) -> list[EvalTask]:
    """Return the tasks, environments first. The settings of an environment take precedence over the common ones.

    Raises ConfigError also if there is no environment, two have the same name, or a benchmark is not installed.
    """
    counts: Sequence[int | None] = rollouts_per_benchmark or [None] * len(benchmarks)
    configs = [*environments, *map(benchmark_environment, benchmarks, counts, [benchmark_data] * len(benchmarks))]
    if not configs:
        raise ConfigError("no environment to run; name one with --env.id")
    labels = [env.label for env in configs]
    if duplicates := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f"two environments are called {duplicates.pop()!r}; give one of them another env.name")
    with translate_error(ValueError, lambda error: ConfigError(str(error))):
        return [
            EvalTask(
                env=env,
                sampling=env.sampling_with(sampling),
                num_examples=num_examples if env.num_examples is None else env.num_examples,
                rollouts=rollouts if env.rollouts_per_example is None else env.rollouts_per_example,
            )
            for env in configs
        ]


def check_installed(environments: Sequence[EvalEnvConfig]) -> None:
    """Raise ConfigError if an environment that is not to be installed is missing."""
    for index, env in enumerate(environments):
        check_environment(env, f"env.{index}.id")


def choose_examples(available: int, wanted: int, seed: int) -> list[int]:
    """Choose `wanted` of `available` examples by seed, in ascending order; -1 or too many takes all.

    With the same seed, a larger choice contains every smaller one.
    """
    if wanted < 0 or wanted >= available:
        return list(range(available))
    return sorted(np.random.default_rng(seed).permutation(available)[:wanted].tolist())


def _math_benchmark(dataset: str, split: str) -> EvalEnvConfig:
    """Return a benchmark of all problems of a data set with `problem` and `answer`, graded by math-verify."""
    args = {"dataset_name": dataset, "dataset_split": split, "eval_dataset_name": None}
    return EvalEnvConfig(id="hendrycks_math", args=args)


def _code_benchmark(dataset: str = "", subset: str | None = None) -> EvalEnvConfig:
    """Return a benchmark of all problems of a data set's test split; a program passes if it passes all tests."""
    args: dict[str, Any] = {"reward": "all", "max_tests": 1000}
    if dataset:
        args |= {"dataset_name": dataset, "dataset_subset": subset, "train_split": "test", "eval_split": "test"}
    return EvalEnvConfig(id="code_tests", args=args)


BENCHMARKS = {
    "math500": _math_benchmark("HuggingFaceH4/MATH-500", "test"),
    "aime24": _math_benchmark("HuggingFaceH4/aime_2024", "train"),
    "aime25": _math_benchmark("math-ai/aime25", "test"),
    "gsm8k": EvalEnvConfig(id="gsm8k", args={"train_split": "test"}),
    "humaneval": _code_benchmark("openai/openai_humaneval"),
    "humanevalplus": _code_benchmark("evalplus/humanevalplus"),
    "mbpp": _code_benchmark("google-research-datasets/mbpp", "full"),
    "livecodebench": EvalEnvConfig(id="primeintellect/livecodebench"),
}
"""By name. An id with an owner is on the hub, any other id is in this repository."""

_WITH_LOCAL_DATA = BENCHMARKS | {"livecodebench": _code_benchmark()}
_SUFFIXES = (".jsonl", ".json", ".parquet")


def benchmark_environment(
    name: str, rollouts_per_example: int | None = None, data_dir: Path | None = None
) -> EvalEnvConfig:
    """Return the environment of a benchmark, which reads `data_dir/<name>.jsonl` (or .json, .parquet) if given.

    Raises:
        ConfigError: the benchmark is unknown, its environment is not installed, or its file is missing.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; known benchmarks: {', '.join(sorted(BENCHMARKS))}")
    benchmark = (BENCHMARKS if data_dir is None else _WITH_LOCAL_DATA)[name]
    try:
        find_environment(benchmark.id)
    except ConfigError:
        on_hub = "/" in benchmark.id
        install = f"prime env install {benchmark.id}" if on_hub else f"uv pip install -e environments/{benchmark.id}"
        raise ConfigError(f"benchmark {name} needs the environment {benchmark.id}: run `{install}`") from None
    args = benchmark.args
    if data_dir is not None:
        files = [data_dir / f"{name}{suffix}" for suffix in _SUFFIXES]
        if (file := next((file.resolve() for file in files if file.is_file()), None)) is None:
            raise ConfigError(f"benchmark_data has no {files[0]} (or .json, .parquet); add it, or omit benchmark_data")
        args = args | {"data_path": str(file)}
    return benchmark.model_copy(update={"name": name, "rollouts_per_example": rollouts_per_example, "args": args})
