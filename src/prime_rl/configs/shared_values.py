"""How `rl` copies shared values to trainer, orchestrator and inference before the models are constructed.

A shared value has one key at the top of `rl` (its home) and one in each process (its places), and can be set at any of
them. The home overrides places from weaker sources (`--max-steps 10` over a file's `trainer.max_steps`), missing places
are filled, and any other difference is an error that names both keys. The order of keys and files does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prime_rl.configs.gpu_assignment import assign_gpus, ids_of, is_over_nodes, number
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared.blocks import DEFAULT_MODEL, SERVER_ADDRESS_VAR
from prime_rl.configs.shared.heartbeat import HeartbeatConfig
from prime_rl.core.errors import ConfigError
from prime_rl.loading.provenance import MISSING, ConfigState, Rank
from prime_rl.loading.root_config import RootConfig
from prime_rl.loading.schema import flag


@dataclass(frozen=True, slots=True)
class Shared:
    """A value with several keys.

    Attributes:
        home: its key at the top of `rl`, if any.
        places: its keys in the processes.
        equal: the places must be equal; otherwise they may differ, and only missing ones are filled.
        mutual: a value given at one place fills the others too; otherwise only the home does.
    """

    home: str | None
    places: tuple[str, ...]
    equal: bool = True
    mutual: bool = True


def _both(key: str) -> tuple[str, ...]:
    return f"trainer.{key}", f"orchestrator.{key}"


def _all(key: str) -> tuple[str, ...]:
    return (*_both(key), f"inference.{key}")


_SHARED_GPU = 0.5
"""Share of a GPU's memory for inference if the trainer uses the GPU too."""
_CKPT = [f"ckpt.{key}" for key in ("path", "interval", "save_async", "timeout_seconds", "resume_step", "keep_last",
                                   "keep_interval")]  # fmt: skip
_LOGGERS = ("wandb", "trackio", "tensorboard")
_LOGGER_KEYS = [
    *(f"wandb.{key}" for key in ("project", "entity", "group", "tags", "offline")),
    *(f"trackio.{key}" for key in ("project", "group", "timeout_seconds")),
    *(f"tensorboard.{key}" for key in ("flush_seconds", "timeout_seconds")),
    *(f"{logger}.log_extras" for logger in _LOGGERS),
]
_DEFAULTS = ["log.level", "log.utc", "log.file", "heartbeat.warn_after_seconds", "heartbeat.dead_after_seconds"]

_DIRECTORY = [Shared(key, _all(key)) for key in ("exp_id", "output_dir")]
_VALUES = [
    Shared("model.name", _all("model.name")),
    *(Shared(key, _both(key)) for key in ("max_steps", "async_level", "bench", "bench_steps", *_CKPT)),
    Shared("wandb.id", ("trainer.wandb.id",)),
    Shared("seed", _both("seed"), equal=False, mutual=False),
    Shared("seq_len", ("orchestrator.seq_len", "trainer.model.seq_len"), equal=False),
    Shared("max_model_len", ("inference.model.max_model_len", "trainer.model.max_model_len")),
    Shared("gpu_memory_utilization", ("inference.gpu_memory_utilization",)),
    *(Shared(None, _both(key)) for key in ("tokenizer.name", "fs_consistency_timeout_seconds")),
    *(Shared(key, _both(key), equal=False, mutual=False) for key in _LOGGER_KEYS),
    *(Shared(key, _all(key), equal=False, mutual=False) for key in _DEFAULTS),
    # After both values have their own: the server accepts what the orchestrator samples.
    Shared("orchestrator.seq_len", ("inference.model.max_model_len",), equal=False, mutual=False),
    Shared(None, ("inference.model.max_model_len", "trainer.model.max_model_len")),
]
_ENDPOINT = [Shared(None, (f"inference.server.{key}", f"orchestrator.client.{key}")) for key in ("port", "api_key_var")]


def share_all(state: ConfigState) -> None:
    """Complete the values of all processes from each other.

    Raises:
        ConfigError: two keys contradict each other.
    """
    _switch_blocks(state, "ckpt", together=True)
    for logger in _LOGGERS:
        _switch_blocks(state, logger, together=False)
    _share(state, _DIRECTORY)
    RootConfig.prepare(state)  # applies exp_id to output_dir
    for role in filter(state.is_on, ("trainer", "orchestrator", "inference")):
        state.put(f"{role}.exp_id", None, state.origin("exp_id"))
        if state.is_set("output_dir"):
            state.put(f"{role}.output_dir", state.get("output_dir"), state.origin("output_dir"))
    _share(state, _VALUES)
    if not state.is_set("orchestrator.client.base_url"):
        _share(state, _ENDPOINT)
    for logger in ("wandb", "trackio"):
        _name_runs(state, logger)
    assign_gpus(state)
    if state.is_on("inference"):
        _complete_server(state)


def _share(state: ConfigState, shared: Sequence[Shared]) -> None:
    """Copy each shared value to its places.

    None at the home fills no place, but removes the values of places from weaker sources.
    """
    for value in shared:
        places = tuple(p for p in value.places if _reachable(state, p))
        home = value.home if value.home and _reachable(state, value.home) else None
        _override(state, home, places, value.equal)
        home_is_none = home is not None and state.get(home) is None
        keys = [key for key in (home, *places) if key and (value.mutual or key == home)]
        given = [key for key in keys if state.is_set(key) and not (key == home and home_is_none)]
        if not given:
            continue
        first, *others = given
        for other in others if value.equal else ():
            if str(state.get(other)) != str(state.get(first)):
                raise _conflict(state, first, other, value.home)
        # A home with one place, or with places that may differ, keeps only the value that was given there.
        fill = places if home is None or not value.equal or len(value.places) == 1 else (home, *places)
        for key in fill:
            if not state.is_set(key) or (key == home and home_is_none):
                state.put(key, state.get(first), state.origin(first))


def _override(state: ConfigState, home: str | None, places: Sequence[str], equal: bool) -> None:
    """Use the stronger source of home and place, if their ranks differ."""
    if home is None or not state.is_set(home):
        return
    for place in filter(state.is_set, places):
        ours, theirs = state.origin(home), state.origin(place)
        if ours.rank > theirs.rank and state.get(home) is None:
            state.remove(place)
        elif ours.rank > theirs.rank:
            state.put(place, state.get(home), ours)
        elif equal and ours.rank < theirs.rank and ours.rank <= Rank.ENVIRONMENT:
            state.remove(home)  # the environment only sets defaults for files and flags
            return


def _switch_blocks(state: ConfigState, block: str, together: bool) -> None:
    """Switch an optional block on or off in trainer and orchestrator too (`--ckpt`, `--no-ckpt`).

    With `together`, a block that is on in one place is switched on at home and in the other place.
    """
    for place in _both(block):
        home, given = state.get(block), state.get(place)
        if MISSING in (home, given) or (home is None) == (given is None):
            continue
        if state.origin(place).rank >= state.origin(block).rank:
            raise _conflict(state, block, place)
        if home is None:
            state.put(place, None, state.origin(block))
        else:
            state.remove(place)
    keys = (block, *_both(block))
    on = [key for key in keys if state.is_on(key)]
    if on and (together or on[0] == block):
        for key in keys:
            if not state.is_on(key):
                state.put(key, {}, state.origin(on[0]))


def _name_runs(state: ConfigState, logger: str) -> None:
    """Name the runs of `logger` NAME-trainer and NAME-orchestrator, in one group; NAME defaults to the model's."""
    on = [block for block in (logger, *_both(logger)) if state.is_on(block)]
    if not on:
        return
    name, origin = state.get(f"{logger}.name"), state.origin(f"{logger}.name")
    if not isinstance(name, str):
        name = str(state.get("model.name", DEFAULT_MODEL)).rstrip("/").split("/")[-1]
        origin = state.origin(on[0])
        if on[0] == logger:
            state.put(f"{logger}.name", name, origin)
    for block in on:
        role = block.removesuffix(f".{logger}")
        for key, value in (("name", f"{name}-{role}"), ("group", name)):
            if role != block and state.get(f"{block}.{key}", None) is None:
                state.put(f"{block}.{key}", value, origin)


def _complete_server(state: ConfigState) -> None:
    """Complete the keys that depend on the server that `rl` starts."""
    host = "orchestrator.client.host"
    if state.origin(host).label == SERVER_ADDRESS_VAR:
        state.remove(host)  # its own server is on this machine
    shared = set(ids_of(state, "trainer_gpu_ids", [1])) & set(ids_of(state, "inference_gpu_ids", [0]))
    if shared and not is_over_nodes(state):
        state.fill("inference.gpu_memory_utilization", _SHARED_GPU, state.origin("trainer_gpu_ids"))
    lora = "trainer.model.lora"
    if state.get(f"{lora}.publish") == "adapter":
        for key, value in (("enable_lora", True), ("max_lora_rank", state.get(f"{lora}.rank", None))):
            if value is not None:
                state.fill(f"inference.{key}", value, state.origin(f"{lora}.publish"))
    if number(state, "max_restarts"):  # wait for the server as long as for its first start
        key = "wait_timeout_seconds"
        longest = state.get(f"orchestrator.{key}", OrchestratorConfig.model_fields[key].default)
        state.fill("orchestrator.client.reconnect_seconds", longest, state.origin("max_restarts"))
    elif is_over_nodes(state):  # wait for a lost connection as long as for a heartbeat
        state.fill("orchestrator.client.reconnect_seconds", _dead_after(state), state.origin("nodes"))


def _dead_after(state: ConfigState) -> object:
    return state.get("heartbeat.dead_after_seconds", HeartbeatConfig.model_fields["dead_after_seconds"].default)


def _conflict(state: ConfigState, first: str, other: str, home: str | None = None) -> ConfigError:
    advice = f"set it once, with {flag(home.split('.'))}" if home else "give both the same value"
    return ConfigError(f"{state.describe(first)} and {state.describe(other)} differ; {advice}")


def _reachable(state: ConfigState, key: str) -> bool:
    """Whether all optional blocks around a key are on."""
    blocks = key.split(".")[:-1]
    optional = ("inference", "ckpt", *_LOGGERS)
    ends = (length for length, block in enumerate(blocks, start=1) if block in optional)
    return all(state.is_on(tuple(blocks[:end])) for end in ends)
