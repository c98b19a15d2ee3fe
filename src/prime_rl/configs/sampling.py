"""`sampling`: the sampling of completions."""

from typing import Self

from pydantic import Field, model_validator

from prime_rl.configs.loading.base_config import BaseConfig, common


class SamplingConfig(BaseConfig):
    """Sampling of completions."""

    temperature: float = Field(1.0, ge=0, json_schema_extra=common("Rollouts"))
    """Sampling temperature; the trainer applies the same. 0 is greedy (evaluation only)."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability mass. The trainer applies the same mask."""

    top_k: int = Field(-1, ge=-1)
    """Keep this many of the most likely tokens; -1 keeps all. The trainer applies the same mask."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens with at least this probability relative to the most likely one. The trainer applies the same mask."""

    max_tokens: int | None = Field(None, ge=1, json_schema_extra=common("Rollouts"))
    """Maximum tokens of one turn's completion; None allows the whole sequence length."""

    min_tokens: int = Field(0, ge=0)
    """Minimum tokens of one turn's completion. For evaluation only: the trainer does not exclude the end of a reply."""

    # Upstream configurations set it, and an unknown key would not explain why another value is wrong.
    repetition_penalty: float = Field(1.0, gt=0)
    """Only 1 is supported: the trainer does not apply the penalty, so its log-probabilities would be wrong."""

    seed: int | None = None
    """Seed from which each request derives its own; None samples without a seed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty is not supported: the trainer does not apply it to its log-probabilities; remove it"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}; lower it")
        return self
