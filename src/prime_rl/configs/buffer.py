"""`orchestrator.buffer`: the choice of examples, and the groups that are too easy or too hard to train on."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from prime_rl.configs.loading.base_config import BaseConfig, ImportPath


class _Buffer(BaseConfig):
    type: str
    """Choice of examples."""

    seed: int | None = Field(None, ge=0)
    """Seed of the choice; None uses the orchestrator's seed."""


class _FilteredBuffer(_Buffer):
    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all 0, or all 1 (metric filter/difficulty); others are sampled instead."""


class SimpleBufferConfig(_FilteredBuffer):
    """Every example once per epoch, shuffled for each epoch."""

    type: Literal["simple"] = "simple"


class DifficultyPoolBufferConfig(_FilteredBuffer):
    """Three pools (easy, normal, hard) by the mean reward of an example's last group; all examples start as normal."""

    aliases: ClassVar[dict[str, str]] = {"easy_border": "easy_threshold", "hard_border": "hard_threshold"}

    type: Literal["difficulty-pool"] = "difficulty-pool"

    easy_threshold: float = 0.8
    """An example is easy if the mean reward of its group is at least this."""

    hard_threshold: float = 0.2
    """An example is hard if the mean reward of its group is at most this."""

    easy_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the draws from the easy pool; another pool replaces an empty one."""

    hard_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the draws from the hard pool; the rest is normal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hard_threshold >= self.easy_threshold:
            raise ValueError(
                f"hard_threshold = {self.hard_threshold} is not below easy_threshold = {self.easy_threshold}"
            )
        if self.easy_fraction + self.hard_fraction > 1:
            raise ValueError(
                f"easy_fraction = {self.easy_fraction} and hard_fraction = {self.hard_fraction} add up to more than 1"
            )
        return self


class CurriculumBufferConfig(_FilteredBuffer):
    """A function of yours weights the examples, by the results so far."""

    type: Literal["curriculum"] = "curriculum"

    import_path: ImportPath
    """The function as package.module:function, importable or in the working directory, or folder/file.py:function."""

    kwargs: dict[str, JsonValue] = Field({})
    """Keyword arguments of the function, after the results."""


class OnlineDifficultyBufferConfig(_Buffer):
    """As simple, but groups with a mean reward outside a range are dropped (metric filter/difficulty)."""

    type: Literal["online-difficulty"] = "online-difficulty"

    min_reward: float = 0.01
    """Minimum mean reward of a group to train on."""

    max_reward: float = 0.99
    """Maximum mean reward of a group to train on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_reward > self.max_reward:
            raise ValueError(f"min_reward = {self.min_reward} is above max_reward = {self.max_reward}")
        return self


BufferConfig = Annotated[
    SimpleBufferConfig | DifficultyPoolBufferConfig | CurriculumBufferConfig | OnlineDifficultyBufferConfig,
    Field(discriminator="type"),
]
