"""The dial `algorithm` of `rl`: one name sets the matching advantage and loss; what is set by itself goes before it.

A block is set unless its own `type` comes from a source at least as strong (a flag before a file): then that stays.
Single keys of a block likewise: `--algorithm grpo --trainer.loss.eps-high 0.28` is GRPO with clip-higher.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.schema import flag, resolve, tag_of
from prime_rl.configs.state import Origin, Rank, State
from prime_rl.errors import ConfigError

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
# On policy, AIPO's gradient is REINFORCE's: methods that only change the baseline keep it, and stay right off policy.
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
"""Name -> (orchestrator.advantage, trainer.loss); what is not named keeps its default."""

_BLOCKS = ("orchestrator.advantage", "trainer.loss")


def apply_algorithm(state: State) -> None:
    """Set the two blocks as `algorithm` says.

    Raises:
        ConfigError: a key that was given beside the dial is none of the variant that it sets.
    """
    name = state.get("algorithm")
    if name not in ALGORITHMS:
        return  # left out; or wrong, which pydantic explains
    for block, preset in zip(_BLOCKS, ALGORITHMS[name], strict=True):
        _set_block(state, block, preset, state.origin("algorithm"))


def measure_fixed_length(state: State, default: int) -> None:
    """Let `normalization = fixed` divide by the orchestrator's seq_len, the longest a sample can be.

    Args:
        state: changed in place, after shared values were handed over.
        default: the orchestrator's seq_len where nobody sets it.
    """
    kind, weights = (state.get(f"trainer.loss.{key}") for key in ("type", "normalization"))
    if weights != "fixed" and (kind != "dr_grpo" or state.is_set("trainer.loss.normalization")):
        return
    if state.get("trainer.loss.fixed_length") is None or not state.is_set("trainer.loss.fixed_length"):
        given = state.is_set("orchestrator.seq_len")
        origin = state.origin("orchestrator.seq_len") if given else Origin(Rank.DEFAULT, "default")
        state.put("trainer.loss.fixed_length", state.get("orchestrator.seq_len") if given else default, origin)


def _set_block(state: State, block: str, preset: Mapping[str, Any], origin: Origin) -> None:
    kind = f"{block}.type"
    if state.is_set(kind) and state.get(kind) != preset["type"]:
        if state.origin(kind).rank >= origin.rank:
            return
        _forget(state, block, origin.rank)
    if not state.is_set(kind):
        _require_known(state, block, preset["type"], origin)
    for key, value in preset.items():
        place = f"{block}.{key}"
        if not state.is_set(place) or state.origin(place).rank < origin.rank:
            state.put(place, value, origin)


def _forget(state: State, block: str, rank: Rank) -> None:
    """Forget what weaker sources gave to another variant, but not keys that mean the same to all, such as `kl`."""
    fields = [variant.model_fields for variant in _variants(state, block)]
    for key in list(state.get(block)):
        same = all(key in known and known[key].default == fields[0][key].default for known in fields)
        place = f"{block}.{key}"
        if not same and state.origin(place).rank < rank:
            state.remove(place)


def _require_known(state: State, block: str, kind: str, origin: Origin) -> None:
    """Keys without a type are for the default variant: those that the new one lacks are dropped only if weaker."""
    given = state.get(block)
    known = next(variant.model_fields for variant in _variants(state, block) if tag_of(variant) == kind)
    for key in given if isinstance(given, dict) else ():
        place = f"{block}.{key}"
        if key not in known and state.origin(place).rank >= origin.rank:
            raise ConfigError(
                f"{state.describe(place)} is no key of {block}.type = {kind}, which {state.describe('algorithm')} "
                f"sets; leave it out, or set {flag(f'{block}.type'.split('.'))} as well"
            )


def _variants(state: State, block: str) -> Sequence[type[BaseConfig]]:
    return resolve(state.root, tuple(block.split(".")))[1].variants
