"""The benchmarks that can be evaluated by name (`--benchmarks math500,aime24`)."""

from prime_rl.configs.eval_common import EvalEnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_id import find_environment


def _math_benchmark(dataset: str, split: str) -> EvalEnvConfig:
    """Return a benchmark of all problems of a data set with `problem` and `answer`, graded by math-verify."""
    args = {"dataset_name": dataset, "dataset_split": split, "eval_dataset_name": None}
    return EvalEnvConfig(id="hendrycks_math", args=args)


BENCHMARKS = {
    "math500": _math_benchmark("HuggingFaceH4/MATH-500", "test"),
    "aime24": _math_benchmark("HuggingFaceH4/aime_2024", "train"),
    "aime25": _math_benchmark("math-ai/aime25", "test"),
    "gsm8k": EvalEnvConfig(id="gsm8k", args={"train_split": "test"}),
    "livecodebench": EvalEnvConfig(id="primeintellect/livecodebench"),
}
"""By name. An id with an owner is on the hub, any other id is in this repository."""


def benchmark_environment(name: str, rollouts_per_example: int | None = None) -> EvalEnvConfig:
    """Return the environment of a benchmark; raise ConfigError if it is unknown or not installed."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise ConfigError(f"there is no benchmark {name!r}; known benchmarks: {', '.join(sorted(BENCHMARKS))}")
    try:
        find_environment(benchmark.id)
    except ConfigError:
        on_hub = "/" in benchmark.id
        install = f"prime env install {benchmark.id}" if on_hub else f"uv pip install -e environments/{benchmark.id}"
        raise ConfigError(f"benchmark {name} needs the environment {benchmark.id}: run `{install}`") from None
    return benchmark.model_copy(update={"name": name, "rollouts_per_example": rollouts_per_example})
