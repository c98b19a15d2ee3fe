"""`orchestrator.eval` and `orchestrator.val`: evaluation during training."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.environment import EvalEnvConfig, ExampleCount
from prime_rl.configs.lists import IntList, StrList, UrlList
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.configs.sampling import SamplingConfig


class _Evaluation(BaseConfig):
    num_examples: ExampleCount = -1
    """Examples per environment; -1 is all."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts n of each example; an evaluation reports pass@k for k up to n."""

    interval: int = Field(100, ge=1)
    """Steps between two evaluations; the last version is always evaluated."""

    max_concurrent: int = Field(64, ge=1)
    """Maximum number of these rollouts in flight, in addition to training."""


class OnlineEvalConfig(_Evaluation):
    """Evaluation in environments or benchmarks during training."""

    aliases: ClassVar[dict[str, str]] = {"environment": "env"}
    deprecated: ClassVar[dict[str, str]] = {"hold_s": "hold_timeout_seconds"}

    env: list[EvalEnvConfig] = Field([])
    """Environments to evaluate in."""

    benchmarks: StrList = Field([], json_schema_extra=common("Evaluation"))
    """Named benchmarks, in addition to `env`: math500, aime24, aime25, gsm8k, humaneval, humanevalplus, mbpp,
    livecodebench."""

    benchmark_data: Path | None = Field(None)
    """Directory with local data of the benchmarks, <name>.jsonl (or .json, .parquet); None reads the hub."""

    rollouts_per_prompt: IntList = Field([])
    """Rollouts of each example, one number per benchmark; if empty, rollouts_per_example."""

    eval_base_model: bool = True
    """Also evaluate version 0."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of completions."""

    pass_threshold: float = 1.0
    """Minimum reward of a rollout that passes (pass@k)."""

    mode: Literal["span", "pinned"] = "span"
    """span continues across weight updates and reports the versions that sampled; pinned evaluates exactly one
    version."""

    base_url: UrlList | None = None
    """pinned: servers for evaluation only, which load the version; None delays weight updates of the run's servers."""

    hold_timeout_seconds: float = Field(60, ge=0)
    """pinned without base_url: longest delay of a weight update by an evaluation, which then continues as span."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rollouts_per_prompt and len(self.rollouts_per_prompt) != len(self.benchmarks):
            raise ValueError(
                f"rollouts_per_prompt has {len(self.rollouts_per_prompt)} numbers for {len(self.benchmarks)} "
                "benchmarks; give one each"
            )
        if not self.env and not self.benchmarks:
            raise ValueError("no environment and no benchmark; add [[eval.env]], for `rl` [[orchestrator.eval.env]]")
        if self.base_url is not None and self.mode == "span":
            raise ValueError("eval.base_url needs eval.mode = pinned; span uses the servers of the run")
        for env in self.env:
            env.sampling_with(self.sampling)  # raises ValueError for an invalid override
        return self

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `hold_timeout_seconds` where no weight update is delayed."""
        if self.mode == "span":
            yield "hold_timeout_seconds", "has no effect with eval.mode = span; it is for pinned"
        elif self.base_url is not None:
            yield "hold_timeout_seconds", "has no effect if eval.base_url is set: weight updates are not delayed"


class ValConfig(_Evaluation):
    """Validation on the evaluation split of the training environments; each must have one."""

    num_examples: ExampleCount = 16
    interval: int = Field(10, ge=1)
