"""`algorithm` of `rl`: a preset that sets the matching advantage and loss.

The preset does not replace a block's `type`, or a single key, from a source that is at least as strong (flags are
stronger than files): `--algorithm grpo --trainer.loss.eps-high 0.28` is GRPO with clip-higher.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prime_rl.configs.loading.base_config import BaseConfig
from prime_rl.configs.loading.provenance import MISSING, ConfigState, Origin, Rank
from prime_rl.configs.loading.schema import flag, resolve, tag_of
from prime_rl.core.errors import ConfigError

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "opo",
    "rloo",
    "max_rl",
    "reinforce",
    "reinforce++",
    "reinforce++_baseline",
    "aipo",
    "dppo",
    "icepop",
    "tis",
    "decoupled_ppo",
]

_MEAN, _MEAN_AND_STD = {"type": "grpo", "std": False}, {"type": "grpo", "std": True}
# On policy, AIPO has the gradient of REINFORCE: methods that only change the baseline use it, and stay correct off
# policy.
_AIPO, _PPO = {"type": "aipo"}, {"type": "ppo", "eps_low": 0.2, "eps_high": 0.2}

ALGORITHMS: Mapping[Algorithm, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "grpo": (_MEAN_AND_STD, {"type": "grpo"}),
    "dr_grpo": ({"type": "dr_grpo"}, {"type": "dr_grpo"}),
    "dapo": (_MEAN_AND_STD, {"type": "ppo", "eps_low": 0.2, "eps_high": 0.28}),
    "gspo": (_MEAN_AND_STD, {"type": "gspo"}),
    "cispo": (_MEAN_AND_STD, {"type": "cispo"}),
    "opo": ({"type": "opo"}, _AIPO),
    "rloo": ({"type": "rloo"}, _AIPO),
    "max_rl": ({"type": "max_rl"}, _AIPO),
    "reinforce": ({"type": "none"}, {"type": "reinforce"}),
    "reinforce++": ({"type": "reinforce_pp"}, _PPO),
    "reinforce++_baseline": ({"type": "reinforce_pp_baseline"}, _PPO),
    "aipo": (_MEAN, _AIPO),
    "dppo": (_MEAN, {"type": "dppo"}),
    "icepop": (_MEAN, {"type": "icepop"}),
    "tis": (_MEAN, {"type": "tis"}),
    "decoupled_ppo": (_MEAN, {"type": "decoupled_ppo"}),
}
"""Name -> (orchestrator.advantage, trainer.loss); other keys keep their defaults."""

_BLOCKS = ("orchestrator.advantage", "trainer.loss")


def apply_algorithm(state: ConfigState) -> None:
    """Set advantage and loss to the preset `algorithm`.

    Raises:
        ConfigError: a given key does not exist in the preset's variant.
    """
    presets = ALGORITHMS.get(state.get("algorithm"), ())  # of another value, which pydantic reports, none
    for block, preset in zip(_BLOCKS, presets, strict=False):
        _set_block(state, block, preset, state.origin("algorithm"))


def set_fixed_length(state: ConfigState, seq_len: int) -> None:
    """Set `fixed_length` of `normalization = fixed` to the orchestrator's `seq_len`, the maximum length of a sample.

    Of several runs each has its own, which the trainer sets.
    """
    if state.get("runs", None):
        return
    kind, weights = (state.get(f"trainer.loss.{key}") for key in ("type", "normalization"))
    if weights != "fixed" and (kind != "dr_grpo" or weights is not MISSING):
        return
    if state.get("trainer.loss.fixed_length", None) is None:
        state.put("trainer.loss.fixed_length", seq_len, state.origin("orchestrator.seq_len"))


def _set_block(state: ConfigState, block: str, preset: Mapping[str, Any], origin: Origin) -> None:
    kind = f"{block}.type"
    if state.is_set(kind) and state.get(kind) != preset["type"]:
        if state.origin(kind).rank >= origin.rank:
            return
        _remove_other_variant(state, block, origin.rank)
    if not state.is_set(kind):
        _require_known(state, block, preset["type"], origin)
    for key, value in preset.items():
        place = f"{block}.{key}"
        if not state.is_set(place) or state.origin(place).rank < origin.rank:
            state.put(place, value, origin)


def _remove_other_variant(state: ConfigState, block: str, rank: Rank) -> None:
    """Remove weaker values of another variant, except keys that all variants share, such as `kl`."""
    fields = [variant.model_fields for variant in _variants(state, block)]
    for key in list(state.get(block)):
        same = all(key in known and known[key].default == fields[0][key].default for known in fields)
        if not same and state.origin(f"{block}.{key}").rank < rank:
            state.remove(f"{block}.{key}")


def _require_known(state: ConfigState, block: str, kind: str, origin: Origin) -> None:
    """Reject keys without a `type` that the preset's variant lacks, unless their source is weaker."""
    known = next(variant.model_fields for variant in _variants(state, block) if tag_of(variant) == kind)
    for key in state.get(block) if state.is_on(block) else ():
        place = f"{block}.{key}"
        if key not in known and state.origin(place).rank >= origin.rank:
            raise ConfigError(
                f"{state.describe(place)} is not a key of {block}.type = {kind}, which {state.describe('algorithm')} "
                f"sets; remove it, or set {flag((block, 'type'))} as well"
            )


def _variants(state: ConfigState, block: str) -> Sequence[type[BaseConfig]]:
    return resolve(state.root, block.split("."))[1].variants
