"""Keys of `uv run synthesize`."""

from typing import ClassVar, Literal

from pydantic import Field

from prime_rl.configs.rollouts.eval_common import EvalEnvConfig, EvaluationConfig
from prime_rl.loading.base_config import common


class SynthesizeConfig(EvaluationConfig):
    """Training data for `sft`: conversations of a served model in environments, written to output_dir/synthesis."""

    command: ClassVar[str] = "synthesize"

    env: list[EvalEnvConfig] = Field(default_factory=lambda: [EvalEnvConfig()], min_length=1)

    split: Literal["train", "eval"] = Field("train", json_schema_extra=common("Rollouts"))
    """Split of the environments' examples."""

    min_reward: float | None = Field(None, json_schema_extra=common("Rollouts"))
    """Write only rollouts with at least this reward; None writes all."""

    keep_truncated: bool = False
    """Also write rollouts that a token limit truncated."""
