"""Keys of `orchestrator.advantage` and `orchestrator.reward_shaping`: how rewards become advantages."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig, ImportPath


class _Advantage(BaseConfig):
    """What every kind has."""

    neg_clipped: bool = False
    """Set negative advantages to 0: only rollouts better than the baseline teach."""


class GRPOAdvantageConfig(_Advantage):
    """GRPO: reward minus the mean of its group."""

    type: Literal["grpo"] = "grpo"
    """Kind of advantage."""

    std: bool = False
    """Also divide by the standard deviation of the group."""

    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the rollouts, as OPO does."""


class DrGRPOAdvantageConfig(_Advantage):
    """Dr. GRPO: reward minus the mean of its group, never divided by the standard deviation."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Kind of advantage."""


class RLOOAdvantageConfig(_Advantage):
    """RLOO: reward minus the mean of the other rollouts of its group."""

    type: Literal["rloo"] = "rloo"
    """Kind of advantage."""


class OPOAdvantageConfig(_Advantage):
    """OPO: reward minus the length-weighted mean of its group."""

    type: Literal["opo"] = "opo"
    """Kind of advantage."""


class ReinforcePPAdvantageConfig(_Advantage):
    """REINFORCE++: reward minus the mean of the batch, over the standard deviation of the batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Kind of advantage."""


class ReinforcePPBaselineAdvantageConfig(_Advantage):
    """REINFORCE++ with baseline: reward minus the mean of its group, over the standard deviation of the batch."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """Kind of advantage."""


class MaxRLAdvantageConfig(_Advantage):
    """MaxRL: reward minus the mean of its group, over that mean."""

    type: Literal["max_rl"] = "max_rl"
    """Kind of advantage."""


class NoAdvantageConfig(_Advantage):
    """No baseline: the advantage is the reward."""

    type: Literal["none"] = "none"
    """Kind of advantage."""


class CustomAdvantageConfig(_Advantage):
    """Your own function of the groups of a batch."""

    type: Literal["custom"] = "custom"
    """Kind of advantage."""

    import_path: ImportPath = ""
    """Where the function is: package.module:function, importable or in the working directory."""

    kwargs: dict[str, object] = Field({})
    """Keyword arguments of the function, after the groups of the batch."""

    over_batch: bool = False
    """A group's advantages depend on the other groups of the batch, so filter_zero_advantage drops none."""


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


class LengthPenaltyConfig(BaseConfig):
    """Take from each reward a share of the group's mean reward, by how long the rollout is within its group."""

    type: Literal["linear"] = "linear"
    """Kind of penalty."""

    output_weight: float = Field(0.25, ge=0)
    """Share that the rollout with the most sampled tokens pays."""

    input_weight: float = Field(0.1, ge=0)
    """Share that the rollout with the most tokens given to the model (prompt, tools, user) pays."""

    turns_weight: float = Field(0.1, ge=0)
    """Share that the rollout with the most turns pays."""


class LengthBonusConfig(BaseConfig):
    """Raise the rewards of those best rollouts of a group that are shorter than the best are on average."""

    shorthand: ClassVar[str | None] = "weight"

    weight: float = Field(1.0, ge=0)
    """Factor of the bonus: a best rollout of length 0 gets 1 + weight times its reward."""


class RewardShapingConfig(BaseConfig):
    """Changes to the rewards of a group before its advantages are computed. Metrics show the rewards as scored."""

    length_penalty: LengthPenaltyConfig | None = None
    """Penalty on long rollouts; None leaves rewards alone."""

    length_bonus: LengthBonusConfig | None = None
    """Bonus for short rollouts among the best; None leaves rewards alone."""
