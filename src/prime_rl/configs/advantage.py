"""`orchestrator.advantage` and `orchestrator.reward_shaping`: from rewards to advantages."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig, ImportPath


class _Advantage(BaseConfig):
    deprecated: ClassVar[dict[str, str]] = {"neg_clipped": "clip_negative"}

    type: str
    """Advantage estimator."""

    clip_negative: bool = False
    """Set negative advantages to 0: train only on rollouts that are better than the baseline."""


class GRPOAdvantageConfig(_Advantage):
    """GRPO: reward minus the group mean."""

    type: Literal["grpo"] = "grpo"

    std: bool = False
    """Also divide by the group's standard deviation."""

    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the rollouts, as OPO does."""


class DrGRPOAdvantageConfig(_Advantage):
    """Dr. GRPO: reward minus the group mean, never divided by the standard deviation."""

    type: Literal["dr_grpo"] = "dr_grpo"


class RLOOAdvantageConfig(_Advantage):
    """RLOO: reward minus the mean of the other rollouts of the group."""

    type: Literal["rloo"] = "rloo"


class OPOAdvantageConfig(_Advantage):
    """OPO: reward minus the length-weighted group mean."""

    type: Literal["opo"] = "opo"


class ReinforcePPAdvantageConfig(_Advantage):
    """REINFORCE++: reward minus the batch mean, divided by the batch standard deviation."""

    type: Literal["reinforce_pp"] = "reinforce_pp"


class ReinforcePPBaselineAdvantageConfig(_Advantage):
    """REINFORCE++ with baseline: reward minus the group mean, divided by the batch standard deviation."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class MaxRLAdvantageConfig(_Advantage):
    """MaxRL: reward minus the group mean, divided by that mean."""

    type: Literal["max_rl"] = "max_rl"


class NoAdvantageConfig(_Advantage):
    """No baseline: the advantage is the reward."""

    type: Literal["none"] = "none"


class CustomAdvantageConfig(_Advantage):
    """A user's function of the groups of a batch."""

    deprecated: ClassVar[dict[str, str]] = {"over_batch": "batch_level"}

    type: Literal["custom"] = "custom"

    import_path: ImportPath = ""
    """The function as package.module:function, importable or in the working directory, or folder/file.py:function."""

    kwargs: dict[str, object] = Field({})
    """Keyword arguments of the function, after the groups of the batch."""

    batch_level: bool = False
    """The advantages of a group depend on the other groups of the batch, so filter_zero_advantage drops none."""


AdvantageConfig = Annotated[
    GRPOAdvantageConfig
    | DrGRPOAdvantageConfig
    | RLOOAdvantageConfig
    | OPOAdvantageConfig
    | ReinforcePPAdvantageConfig
    | ReinforcePPBaselineAdvantageConfig
    | MaxRLAdvantageConfig
    | NoAdvantageConfig
    | CustomAdvantageConfig,
    Field(discriminator="type"),
]


GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "max_rl"})
"""Types whose advantage is 0 for a group of one rollout."""


class LengthPenaltyConfig(BaseConfig):
    """Subtract a share of the group's mean reward from each reward, by the length of the rollout in its group."""

    type: Literal["linear"] = "linear"
    """Form of the penalty."""

    output_weight: float = Field(0.25, ge=0)
    """Share subtracted from the rollout with the most sampled tokens."""

    input_weight: float = Field(0.1, ge=0)
    """Share subtracted from the rollout with the most input tokens (prompt, tools, user)."""

    turns_weight: float = Field(0.1, ge=0)
    """Share subtracted from the rollout with the most turns."""


class LengthBonusConfig(BaseConfig):
    """Increase the rewards of a group's best rollouts that are shorter than the average of the best."""

    shorthand: ClassVar[str | None] = "weight"

    weight: float = Field(1.0, ge=0)
    """Factor of the bonus: a best rollout of length 0 gets 1 + weight times its reward."""


class RewardShapingConfig(BaseConfig):
    """Changes of a group's rewards before its advantages are computed. Metrics show the unchanged rewards."""

    length_penalty: LengthPenaltyConfig | None = None
    """Penalty for long rollouts; None applies none."""

    length_bonus: LengthBonusConfig | None = None
    """Bonus for short rollouts among the best; None applies none."""
