"""`sampling`: the sampling of completions, and what training does with each key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

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

    seed: int | None = Field(None, ge=0)
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Values of a key that training refuses.

    Attributes:
        values: in words, for the documentation.
        applies: returns whether a value is one of them.
        reason: end of the error message, which starts with the key and its value.
    """

    values: str
    applies: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class TrainedSampling:
    """What training does with a key of `sampling`.

    Attributes:
        effect: "same distribution": the trainer computes the log-probabilities of the distribution that was sampled
            from; "refused": only the default is accepted; "no effect": the key does not change the distribution.
        how: the reason, for the documentation.
        refusals: of these values; all but the default are refused if `effect` says so.
    """

    effect: Literal["same distribution", "refused", "no effect"]
    how: str
    refusals: tuple[Refusal, ...] = ()


_ONE_TOKEN = "leaves one token to choose from, whose gradient is 0"

TRAINED_SAMPLING: dict[str, TrainedSampling] = {
    "temperature": TrainedSampling(
        "same distribution",
        "the trainer divides its logits",
        (
            Refusal("0", lambda value: value == 0, "gives every rollout of a group the same reward; set it above 0"),
            Refusal(
                "below 0.01",
                lambda value: value < 0.01,
                "is raised to 0.01 by vLLM, and the trainer would compute other log-probabilities; "
                "set it to 0.01 or more",
            ),
        ),
    ),
    "top_p": TrainedSampling(
        "same distribution",
        "the trainer excludes the same tokens",
        (
            Refusal(
                "below 0.1",
                lambda value: value < 0.1,
                f"{_ONE_TOKEN}, wherever its probability is above top_p; set it to 0.1 or more",
            ),
        ),
    ),
    "top_k": TrainedSampling(
        "same distribution",
        "the trainer excludes the same tokens",
        (Refusal("1", lambda value: value == 1, f"{_ONE_TOKEN}; set it above 1, or to -1"),),
    ),
    "min_p": TrainedSampling(
        "same distribution",
        "the trainer excludes the same tokens",
        (Refusal("above 0.9", lambda value: value > 0.9, f"{_ONE_TOKEN}; set it to 0.9 or less"),),
    ),
    "max_tokens": TrainedSampling("no effect", "it ends a reply; the tokens before are sampled as without it"),
    "min_tokens": TrainedSampling(
        "refused",
        "the sampler excludes the end of the reply, and the trainer does not",
        (
            Refusal(
                "above 0",
                lambda value: value > 0,
                "is not supported in training: the sampler excludes the end of the reply, and the trainer does not; "
                "remove it",
            ),
        ),
    ),
    "repetition_penalty": TrainedSampling(
        "refused",
        "the trainer does not apply it; refused in evaluations too",
        (Refusal("all but 1", lambda value: value != 1, "is not supported; remove it"),),
    ),
    "seed": TrainedSampling("no effect", "it chooses the random numbers"),
}
"""What training does with each key. The trainer's side of the same distribution is trainer/model/lm_head.py."""


def check_trained_sampling(sampling: SamplingConfig, where: str = "") -> None:
    """Raise ValueError for a value that training refuses; `where` names an environment that overrides it."""
    for key, trained in TRAINED_SAMPLING.items():
        value = getattr(sampling, key)
        for refusal in trained.refusals:
            if refusal.applies(value):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ValueError(f"sampling.{key} = {shown}{where} {refusal.reason}")
