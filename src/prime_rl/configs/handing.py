"""How `rl` hands shared values to the three, before they are constructed.

A shared value has one home at the top of `rl` and a place in each of the three. It may be typed at any of them. The
home overrides places of weaker sources (`--max-steps 10` over a file's `trainer.max_steps`), places that were left out
are filled, and any other disagreement is an error that names both places. No order of keys or files matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prime_rl.configs.base import move_to_experiment
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.lora import LoRAConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.schema import flag
from prime_rl.configs.shared import DEFAULT_MODEL
from prime_rl.configs.state import MISSING, Origin, Rank, State
from prime_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shared:
    """A value with several places.

    Attributes:
        home: its key at the top of `rl`; None if it has none.
        places: its keys in the three.
        equal: the places must agree; otherwise they may differ on purpose and are only filled where left out.
        mutual: what is given at one place fills the others too; otherwise only the home does.
    """

    home: str | None
    places: tuple[str, ...]
    equal: bool = True
    mutual: bool = True


def _both(key: str) -> tuple[str, str]:
    return f"trainer.{key}", f"orchestrator.{key}"


_SHARED_GPU = 0.5
_CKPT_KEYS = ("path", "interval", "save_async", "timeout", "resume_step", "keep_last", "keep_interval")
_WANDB_KEYS = ("project", "entity", "group", "tags", "offline", "log_extras")

_RUN = (Shared("exp_id", _both("exp_id")), Shared("output_dir", (*_both("output_dir"), "inference.output_dir")))

VALUES = (
    Shared("model.name", (*_both("model.name"), "inference.model.name")),
    Shared("max_steps", _both("max_steps")),
    Shared("async_level", _both("async_level")),
    Shared("bench", _both("bench")),
    Shared("bench_steps", _both("bench_steps")),
    *(Shared(f"ckpt.{key}", _both(f"ckpt.{key}")) for key in _CKPT_KEYS),
    Shared("wandb.id", ("trainer.wandb.id",)),
    Shared("seed", _both("seed"), equal=False, mutual=False),
    Shared("seq_len", ("orchestrator.seq_len", "trainer.model.seq_len"), equal=False),
    Shared("max_model_len", ("inference.model.max_model_len",)),
    Shared("gpu_memory_utilization", ("inference.gpu_memory_utilization",)),
    Shared(None, _both("tokenizer.name")),
    Shared(None, _both("visibility_seconds")),
    *(Shared(f"wandb.{key}", _both(f"wandb.{key}"), equal=False, mutual=False) for key in _WANDB_KEYS),
    *(
        Shared(f"log.{key}", (*_both(f"log.{key}"), f"inference.log.{key}"), equal=False, mutual=False)
        for key in ("level", "utc")
    ),
    *(
        Shared(f"heartbeat.{key}", (*_both(f"heartbeat.{key}"), f"inference.heartbeat.{key}"), False, False)
        for key in ("silence", "timeout")
    ),
)

ENDPOINT = (
    Shared(None, ("inference.server.port", "orchestrator.client.port")),
    Shared(None, ("inference.server.api_key_var", "orchestrator.client.api_key_var")),
)
MODEL_LEN = (Shared("orchestrator.seq_len", ("inference.model.max_model_len",), equal=False, mutual=False),)


def hand_over(state: State, shared: Sequence[Shared]) -> None:
    """Give every place of each shared value the same value, or say who disagrees.

    None at a home says nothing, except that it is stronger than a place of a weaker source: that one is forgotten.

    Raises:
        ConfigError: two places differ and neither is stronger; names both.
    """
    for value in shared:
        places = tuple(p for p in value.places if _reachable(state, p))
        home = value.home if value.home and _reachable(state, value.home) else None
        _override(state, home, places, value.equal)
        says_none = home is not None and state.get(home) is None
        keys = [key for key in (home, *places) if key and (value.mutual or key == home)]
        given = [key for key in keys if state.is_set(key) and not (key == home and says_none)]
        if not given:
            continue
        if value.equal:
            _require_equal(state, value.home, given)
        # A home that stands for one place, or for places that may differ, says no more than was typed there.
        fill = places if home is None or not value.equal or len(value.places) == 1 else (home, *places)
        for key in fill:
            if not state.is_set(key) or (key == home and says_none):
                state.put(key, state.get(given[0]), state.origin(given[0]))


def switch_blocks(state: State, block: str, places: Sequence[str], together: bool) -> None:
    """Switch an optional block in its places as at its home: `--ckpt` on everywhere, `--no-ckpt` off everywhere.

    Args:
        state: changed in place.
        block: home of the block.
        places: the block in the three.
        together: being on in one place also switches it on at home and in the others.

    Raises:
        ConfigError: home and a place contradict each other and neither is stronger.
    """
    for place in places:
        home, given = state.get(block), state.get(place)
        if MISSING in (home, given) or (home is None) == (given is None):
            continue
        if state.origin(place).rank >= state.origin(block).rank:
            raise ConfigError(_differ(state, block, place))
        if home is None:
            state.put(place, None, state.origin(block))
        else:
            state.remove(place)
    on = [key for key in (block, *places) if isinstance(state.get(key), dict)]
    if on and (together or on[0] == block):
        for key in (block, *places):
            if state.get(key) in (MISSING, None):
                state.put(key, {}, state.origin(on[0]))


def move_run(state: State) -> None:
    """Apply `exp_id` and `output_dir` to all."""
    hand_over(state, _RUN)
    move_to_experiment(state)
    for role in ("trainer", "orchestrator", "inference"):
        if isinstance(state.get(role), dict):
            state.put(f"{role}.exp_id", None, state.origin("exp_id"))
            if state.is_set("output_dir"):
                state.put(f"{role}.output_dir", state.get("output_dir"), state.origin("output_dir"))


def name_wandb_runs(state: State) -> None:
    """Two runs, NAME-trainer and NAME-orchestrator, in one group; NAME is the model's where none is given."""
    if not isinstance(state.get("wandb"), dict):
        return
    name, origin = state.get("wandb.name"), state.origin("wandb.name")
    if not isinstance(name, str):
        model = state.get("model.name") if state.is_set("model.name") else DEFAULT_MODEL
        name, origin = str(model).rstrip("/").split("/")[-1], state.origin("wandb")
        state.put("wandb.name", name, origin)
    for role in ("trainer", "orchestrator"):
        for key, value in (("name", f"{name}-{role}"), ("group", name)):
            if state.get(f"{role}.wandb.{key}") in (MISSING, None):
                state.put(f"{role}.wandb.{key}", value, origin)


def assign_gpus(state: State) -> None:
    """Turn counts into ids, inference first, and ids into data parallelism.

    Raises:
        ConfigError: a count contradicts the ids or the parallel degrees.
    """
    tp, dp = (_number(state, f"inference.parallel.{key}") for key in ("tp", "dp"))
    serves = isinstance(state.get("inference"), dict)
    needed = (tp or 1) * dp if serves and dp is not None else None
    _ids_from_count(state, "inference", 0, needed)
    ids = _ids(state, "inference_gpu_ids", [0])
    _ids_from_count(state, "trainer", max(ids, default=-1) + 1, 1 if needed is not None else None)
    if not serves:
        return
    degree, rest = divmod(len(ids), tp or 1)
    if rest or (dp is not None and dp != degree):
        parallel = (
            f"inference.parallel.tp * dp = {tp or 1} * {dp}" if dp is not None else f"inference.parallel.tp = {tp}"
        )
        raise ConfigError(
            f"inference has {len(ids)} GPUs ({state.origin('inference_gpu_ids').label}) but {parallel}; "
            "set --inference-gpus or --inference.parallel.dp"
        )
    state.put("inference.parallel.dp", degree, state.origin("inference_gpu_ids"))


def leave_room(state: State) -> None:
    """Let inference take half of a GPU that it shares with the trainer, unless somebody says how much."""
    key, ids = "inference.gpu_memory_utilization", "trainer_gpu_ids"
    shared = set(_ids(state, ids, [1])) & set(_ids(state, "inference_gpu_ids", [0]))
    if shared and isinstance(state.get("inference"), dict) and not state.is_set(key):
        state.put(key, _SHARED_GPU, state.origin(ids))


def wait_for_restarts(state: State) -> None:
    """Let the orchestrator wait for a server that `rl` starts again, as long as for one that starts first."""
    key, restarts = "orchestrator.client.reconnect_seconds", _number(state, "max_restarts")
    if restarts and isinstance(state.get("inference"), dict) and not state.is_set(key):
        longest = state.get("orchestrator.wait_timeout_seconds")
        default = OrchestratorConfig.model_fields["wait_timeout_seconds"].default
        state.put(key, default if longest is MISSING else longest, state.origin("max_restarts"))


def serve_adapters(state: State) -> None:
    """Let the server take what the trainer publishes: adapters of its rank."""
    lora, serves = state.get("trainer.model.lora"), isinstance(state.get("inference"), dict)
    if not serves or not isinstance(lora, dict) or lora.get("publish") != "adapter":
        return
    origin = state.origin("trainer.model.lora.publish")
    for key, value in (("enable_lora", True), ("max_lora_rank", lora.get("rank"))):
        if value is not None and not state.is_set(f"inference.{key}"):
            state.put(f"inference.{key}", value, origin)


def check_adapters(lora: LoRAConfig | None, inference: InferenceConfig | None) -> None:
    """See that the server, if it is ours, takes what the trainer publishes.

    Raises:
        ValueError: it takes no adapters, or none of that rank.
    """
    if lora is None or lora.publish != "adapter" or inference is None:
        return
    if not inference.enable_lora:
        raise ValueError(
            "trainer.model.lora.publish = 'adapter' needs inference.enable_lora = true; or publish 'merged'"
        )
    if inference.max_lora_rank < lora.rank:
        raise ValueError(
            f"trainer.model.lora.rank = {lora.rank} is more than inference.max_lora_rank = {inference.max_lora_rank}"
        )


def _override(state: State, home: str | None, places: Sequence[str], equal: bool) -> None:
    """Let the stronger of home and place win, where one of them is stronger."""
    if home is None or not state.is_set(home):
        return
    for place in places:
        if not state.is_set(place):
            continue
        ours, theirs = state.origin(home), state.origin(place)
        if ours.rank > theirs.rank and state.get(home) is None:
            state.remove(place)
        elif ours.rank > theirs.rank:
            state.put(place, state.get(home), ours)
        elif equal and ours.rank < theirs.rank and ours.rank <= Rank.ENVIRONMENT:
            state.remove(home)  # the environment gives defaults; a file or flag says otherwise
            return


def _require_equal(state: State, home: str | None, given: Sequence[str]) -> None:
    first, *others = given
    for other in others:
        if str(state.get(other)) != str(state.get(first)):
            raise ConfigError(_differ(state, first, other, home))


def _differ(state: State, first: str, other: str, home: str | None = None) -> str:
    mend = f"set it once, with {flag(home.split('.'))}" if home else "give both the same value"
    return f"{state.describe(first)} and {state.describe(other)} differ; {mend}"


def _reachable(state: State, key: str) -> bool:
    """A place inside an optional block counts only where the block is on."""
    blocks = key.split(".")[:-1]
    for length, block in enumerate(blocks, start=1):
        if block in ("inference", "ckpt", "wandb") and not isinstance(state.get(tuple(blocks[:length])), dict):
            return False
    return True


def _ids_from_count(state: State, role: str, start: int, needed: int | None) -> None:
    """Resolve `<role>_gpus` (or the GPUs `needed` by the parallel degrees) into `<role>_gpu_ids`."""
    count_key, ids_key = f"{role}_gpus", f"{role}_gpu_ids"
    count = _number(state, count_key)
    origin = state.origin(count_key)
    if count is None:
        if state.is_set(ids_key) or (needed is None and start <= 1):
            return
        count, origin = needed or 1, Origin(Rank.DEFAULT, "default")
    ids = list(range(start, start + count))
    if state.is_set(ids_key) and len(_ids(state, ids_key, [])) != count:
        raise ConfigError(f"{state.describe(count_key)} and {state.describe(ids_key)} differ; give only one of them")
    if not state.is_set(ids_key):
        state.put(ids_key, ids, origin)
    state.put(count_key, None, origin)


def _number(state: State, key: str) -> int | None:
    value = state.get(key)
    try:
        return None if value is None or value is MISSING else int(str(value))
    except ValueError:
        return None  # pydantic explains a wrong type better


def _ids(state: State, key: str, default: list[int]) -> list[int]:
    value = state.get(key)
    if value is MISSING:
        return default
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [int(item) for item in items if str(item).strip().lstrip("-").isdigit()]
