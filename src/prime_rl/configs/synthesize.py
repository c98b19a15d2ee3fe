"""Keys of `uv run synthesize`."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from prime_rl.configs.command_bases import EvaluationConfig
from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.lists import StrList
from prime_rl.configs.loading.base_config import common


class SynthesizeConfig(EvaluationConfig):
    """Training data for `sft`, written to output_dir/synthesis: conversations of a served model in environments, or the
    best rollouts of earlier runs."""

    aliases: ClassVar[dict[str, str]] = {"from": "from_runs"}
    command_name: ClassVar[str] = "synthesize"

    from_runs: StrList = Field([], json_schema_extra=common("Rollouts"))
    """Run directories, of one or several runs or of `eval`, whose rollouts are read instead of sampling new ones."""

    env: list[EvalEnvConfig] = Field(default_factory=lambda: [EvalEnvConfig()], min_length=1)

    split: Literal["train", "eval"] = Field("train", json_schema_extra=common("Rollouts"))
    """Split of the environments' examples."""

    min_reward: float | None = Field(None, json_schema_extra=common("Rollouts"))
    """Write only rollouts with at least this reward; None writes all."""

    max_per_example: int | None = Field(None, ge=1, json_schema_extra=common("Rollouts"))
    """Write so many rollouts of each example, the best ones, without duplicates; None writes one with `from`, otherwise
    all."""

    keep_truncated: bool = False
    """Also write rollouts that a token limit truncated."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report keys of the sampling if no rollout is sampled."""
        if self.from_runs:
            keys = ("model", "env", "client", "sampling", "split", "num_examples", "rollouts_per_example", "seq_len")
            yield from ((key, "has no effect with from, which reads rollouts that exist") for key in keys)
