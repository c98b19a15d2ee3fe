"""The benchmarks that can be evaluated by name (`--benchmarks math500,aime24`)."""

from pathlib import Path
from typing import Any

from prime_rl.configs.rollouts.eval_common import EvalEnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environments.environment_id import find_environment


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
    args = benchmark.args if data_dir is None else benchmark.args | {"data_path": str(_find_file(name, data_dir))}
    return benchmark.model_copy(update={"name": name, "rollouts_per_example": rollouts_per_example, "args": args})


def _find_file(name: str, folder: Path) -> Path:
    files = [folder / f"{name}{suffix}" for suffix in _SUFFIXES]
    if found := next((file.resolve() for file in files if file.is_file()), None):
        return found
    raise ConfigError(f"benchmark_data has no {files[0]} (or .json, .parquet); add it, or omit benchmark_data")
