"""Keys of `uv run eval`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from prime_rl.configs.command_bases import EvaluationConfig
from prime_rl.configs.lists import IntList, StrList
from prime_rl.configs.loading.base_config import common
from prime_rl.configs.monitoring import METRIC_LOGGERS, LoggedConfig


class EvalConfig(EvaluationConfig, LoggedConfig):
    """Evaluation of a served model in environments or benchmarks. Writes the results to output_dir/evals.
    `eval --compare A B` compares the results in two directories."""

    command_name: ClassVar[str] = "eval"
    deprecated: ClassVar[dict[str, str]] = {"eval_base": "eval_base_model"}

    benchmarks: StrList = Field([], json_schema_extra=common("Evaluation"))
    """Named benchmarks, in addition to `env`: math500, aime24, aime25, gsm8k, humaneval, humanevalplus, mbpp,
    livecodebench."""

    benchmark_data: Path | None = Field(None, json_schema_extra=common("Evaluation"))
    """Directory with local data of the benchmarks, <name>.jsonl (or .json, .parquet); None reads the hub."""

    pass_threshold: float = 1.0
    """Minimum reward of a rollout that passes (pass@k)."""

    pass_at: IntList = Field([])
    """The k of pass@k and pass^k, at most rollouts_per_example; by default 1, 2, 4 ... 128."""

    majority_pattern: str | None = None
    """Report the majority vote maj@n. Regular expression of the answer: its last match in a reply, or group 1 of it."""

    weights_dir: Path | None = Field(None, json_schema_extra=common("Evaluation"))
    """Directory of published weights (`weights` of a run) to evaluate in turn on an `inference` server."""

    steps: IntList | None = Field(None, json_schema_extra=common("Evaluation"))
    """Published versions to evaluate; None is all."""

    eval_base_model: bool = True
    """With weights_dir, also evaluate the base model (version 0)."""

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        most = max([self.rollouts_per_example, *(env.rollouts_per_example or 1 for env in self.env)])
        if wrong := [k for k in self.pass_at if not 1 <= k <= most]:
            raise ValueError(f"pass_at contains {wrong[0]}, but an example has {most} rollouts (rollouts_per_example)")
        if self.steps is not None and self.weights_dir is None:
            raise ValueError("steps selects versions of weights_dir; set --weights-dir too")
        try:
            re.compile(self.majority_pattern or "")
        except re.error as error:
            raise ValueError(
                f"majority_pattern = {self.majority_pattern!r} is not a regular expression: {error}"
            ) from None
        return self

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report keys that only some evaluations use."""
        for logger in METRIC_LOGGERS:
            yield f"{logger}.log_extras.interval", "has no effect: each evaluation is logged"
        if not self.benchmarks:
            yield "benchmark_data", "has no effect without benchmarks"
        if self.weights_dir is None:
            yield "eval_base_model", "has no effect without weights_dir"
