"""`model.lora`: low-rank adapters."""

import re
from typing import Literal

from pydantic import Field, field_validator

from prime_rl.configs.shared.blocks import StrList
from prime_rl.loading.base_config import BaseConfig

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoRAConfig(BaseConfig):
    """Train low-rank adapters and freeze all other weights."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(32.0, gt=0)
    """Scale; an adapter's product is multiplied by alpha / rank."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter while gradients are computed. With a value above 0 the trained policy differs from the
    sampling one; mismatch_kl measures the difference."""

    target_modules: StrList = Field(DEFAULT_TARGETS)
    """Linear layers with an adapter: last parts of their names, regular expressions for the whole name, or `all-linear`
    (all but the output head). Default names that the model does not have are ignored."""

    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the frozen weights; auto is the precision of forward and backward. Adapters use float32."""

    publish: Literal["merged", "adapter"] = "merged"
    """Publish all weights with the adapters merged into them, or the adapters alone in peft's format, for a server with
    `enable_lora`."""

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
