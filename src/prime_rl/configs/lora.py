"""Low-rank adapters."""

import re
from typing import Literal

from pydantic import Field, field_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.shared import StrList

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoRAConfig(BaseConfig):
    """Train low-rank adapters and keep all other weights as they are."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(32.0, gt=0)
    """Scale; an adapter's product is multiplied by alpha / rank."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter, where gradients are computed. Above 0 the policy that is trained is not the one that
    samples: mismatch_kl says by how much."""

    target_modules: StrList = Field(DEFAULT_TARGETS)
    """Linear layers that get an adapter: last parts of their names, regular expressions for the whole name, or
    `all-linear` (all but the output head). Of the default those that the model has."""

    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision in which the frozen weights are kept; auto is that of forward and backward. Adapters have float32."""

    publish: Literal["merged", "adapter"] = "merged"
    """What a published version holds: all weights with the adapters merged into them, or the adapters alone in peft's
    format, which a server with `enable_lora` takes."""

    @field_validator("target_modules")
    @classmethod
    def _compiles(cls, targets: list[str]) -> list[str]:
        if not targets:
            raise ValueError(f"target_modules is empty; name linear layers, or {ALL_LINEAR}")
        for target in targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(
                    f"target_modules: {target!r} is neither a name nor a regular expression: {error}"
                ) from None
        return targets
