"""How `rl` copies shared values to its processes, and assigns GPUs to them, before the models are constructed.

A shared value has one key at the top of `rl` (its home) and one in each process (its places), and can be set at any of
them. The home overrides places from weaker sources (`--max-steps 10` over a file's `trainer.max_steps`), missing places
are filled, and any other difference is an error that names both keys. The order of keys and files does not matter.

Counts of GPUs become device ids, inference first. On several nodes inference and trainer have their own, so that both
count from 0 on each node.
"""

import re
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.base_model import DEFAULT_MODEL
from prime_rl.configs.checkpoint import SKIPPED
from prime_rl.configs.client import SERVER_ADDRESS_VAR
from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.configs.loading.provenance import DEFAULT, MISSING, Assignment, ConfigState, Origin, Rank, complete
from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.loading.schema import flag
from prime_rl.configs.loading.sources import flatten
from prime_rl.configs.monitoring import METRIC_LOGGERS, NAMED_LOGGERS
from prime_rl.configs.orchestrator import OrchestratorConfig, slot_name
from prime_rl.core.errors import ConfigError


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
                                   "keep_interval", *SKIPPED)]  # fmt: skip
_LOGGER_KEYS = [
    *(f"wandb.{key}" for key in ("project", "entity", "group", "tags", "offline", "names", "metric_aliases")),
    *(f"trackio.{key}" for key in ("project", "group", "timeout_seconds")),
    *(f"tensorboard.{key}" for key in ("flush_seconds", "timeout_seconds")),
    *(f"mlflow.{key}" for key in ("experiment", "group", "tracking_uri", "timeout_seconds")),
    *(f"{logger}.log_extras" for logger in METRIC_LOGGERS),
]
_DEFAULTS = ["log.level", "log.utc", "log.file", "heartbeat.warn_after_seconds", "heartbeat.dead_after_seconds",
             "model.download_timeout_seconds"]  # fmt: skip

_OF_A_RUN = ("max_steps", "ckpt", *METRIC_LOGGERS)
"""Keys that each run of a shared trainer has itself."""
_CHOSEN_BY_RUN = ("optim", "scheduler", "loss", "num_minibatches", "model.lora.rank", "model.lora.alpha")
"""Keys of the trainer that a run of a shared one may change."""
_IDLE_SECONDS = 5.0
"""After its last run, the trainer that `rl` has started ends."""
_DIRECTORY = [Shared(key, _all(key)) for key in ("exp_id", "output_dir")]
_VALUES = [
    *(Shared(f"model.{key}", _all(f"model.{key}")) for key in ("name", "revision")),
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
    Shared("max_model_len", ("inference.model.max_model_len", "trainer.model.max_model_len")),
]
_ENDPOINT = [Shared(None, (f"inference.server.{key}", f"orchestrator.client.{key}")) for key in ("port", "api_key_var")]


def share_all(state: ConfigState) -> None:
    """Complete the values of all processes from each other.

    Raises:
        ConfigError: two keys contradict each other.
    """
    num_runs = number(state, "trainer.max_concurrent_runs") or 1
    if num_runs > 1:
        for key in _OF_A_RUN:
            if state.get(f"trainer.{key}") is None:
                state.remove(f"trainer.{key}")
    _switch_blocks(state, "ckpt", together=True)
    for logger in METRIC_LOGGERS:
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
    for logger in NAMED_LOGGERS:
        _name_runs(state, logger)
    assign_gpus(state)
    if num_runs > 1:
        _complete_shared_trainer(state, num_runs)
    elif state.get("trainer.model.lora.publish") == "adapter":
        folder = Path(str(state.get("output_dir", RootConfig.model_fields["output_dir"].default)))
        state.fill("orchestrator.model.lora.name", slot_name(folder), state.origin("trainer.model.lora.publish"))
    if state.is_on("inference"):
        _complete_server(state)


def _complete_shared_trainer(state: ConfigState, num_runs: int) -> None:
    """Complete a trainer of several runs, of which each has its own steps, checkpoints and loggers."""
    origin = state.origin("trainer.max_concurrent_runs")
    for key in _OF_A_RUN:
        state.remove(f"trainer.{key}")
    if state.is_on("trainer.model.lora"):
        state.fill("trainer.model.lora.publish", "adapter", origin)
    state.fill("trainer.exit_when_idle_seconds", _IDLE_SECONDS, origin)
    if state.is_on("inference"):
        state.fill("inference.max_loras", num_runs + 1, origin)  # one more for a run that is about to end


def take_joined_run(state: ConfigState) -> None:
    """Prepare a run that joins a running trainer: its folder, the server of that trainer, and no own one.

    Raises:
        ConfigError: the run has no name.
    """
    if not isinstance(given := state.get("join", None), str | Path):
        return
    root, name, origin = Path(given), state.get("exp_id", None), state.origin("join")
    if isinstance(name, str):
        state.put("output_dir", str(root), origin)
        state.put("exp_id", f"run_{name}", state.origin("exp_id"))
    elif Path(str(state.get("output_dir"))).parent != root:  # unlike that of a configuration that `rl` has recorded
        raise ConfigError("join needs the name of the run: --exp-id NAME")
    state.put("inference", None, origin)
    state.remove("trainer.max_concurrent_runs")
    client = "orchestrator.client"
    # Those of `rl`, which started the server, before those of orchestrators, which may use another one.
    places = [*root.glob("configs/run_*.toml")] or [*root.glob("run_*/configs/orchestrator.toml")]
    if places and not any(state.is_set(f"{client}.{key}") for key in ("host", "port", "base_url")):
        newest = max(places, key=lambda file: file.stat().st_mtime)
        for key, value in tomllib.loads(newest.read_text(encoding="utf-8")).get("client", {}).items():
            state.fill(f"{client}.{key}", None if value == "None" else value, Origin(Rank.FILE, str(newest)))


def complete_runs(state: ConfigState) -> None:
    """Complete each of `runs` with the keys of `orchestrator`, and a folder of its own.

    Raises:
        ConfigError: an unknown key, or a name that no folder can have.
    """
    joins, num_runs = state.get("join", None) is not None, number(state, "trainer.max_concurrent_runs") or 1
    if joins:
        name = Path(str(state.get("output_dir"))).name.removeprefix("run_")
        state.put("runs", {name: state.get(f"runs.{name}", {})}, state.origin("join"))
        is_recorded = state.is_set(f"runs.{name}.output_dir")
        for key in _CHOSEN_BY_RUN if not is_recorded else ():
            if (value := state.get(f"trainer.{key}", None)) is not None:
                own = state.get(f"orchestrator.{key}", {})
                merged = {**value, **own} if isinstance(value, dict) and isinstance(own, dict) else own or value
                state.put(f"orchestrator.{key}", merged, state.origin(f"trainer.{key}"))
    elif num_runs > 1 and not state.get("runs", None):
        state.put("runs", {"default": {}}, state.origin("trainer.max_concurrent_runs"))
    root = Path(str(state.get("output_dir", RootConfig.model_fields["output_dir"].default)))
    for name, given in dict(state.get("runs", None) or {}).items():
        origins = (origin for path, origin in state.origins.items() if path[:2] == ("runs", name))
        origin = next(origins, state.origin("runs"))
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not isinstance(given, dict):
            raise ConfigError(f"runs.{name} ({origin.label}) is not a name with a table of the orchestrator's keys")
        run = ConfigState(OrchestratorConfig, deepcopy(state.get("orchestrator", {})))
        run.apply(flatten(OrchestratorConfig, (), given, Origin(origin.rank, f"runs.{name} in {origin.label}")))
        run.apply(_stronger_than_run(state, name))
        for logger in NAMED_LOGGERS:
            if run.is_on(logger) and f"{logger}.name" not in given and "name" not in (given.get(logger) or {}):
                run.put(f"{logger}.name", name, origin)
        run.fill("model.lora.name", f"run_{name}", origin)
        run.put("output_dir", str(root if joins else root / f"run_{name}"), origin)
        state.values["runs"][name] = complete(OrchestratorConfig, run.values)


def _stronger_than_run(state: ConfigState, name: str) -> list[Assignment]:
    """Return the keys of `orchestrator` from a stronger source than those of a run: flags over a recorded run.

    The names of a run in its loggers are its own.
    """
    stronger = []
    for (_, *path), origin in ((known, one) for known, one in state.origins.items() if known[0] == "orchestrator"):
        is_name = len(path) == 2 and path[0] in METRIC_LOGGERS and path[1] == "name"
        value = state.get(("orchestrator", *path))
        if path and not is_name and value is not MISSING and origin.rank > state.origin(("runs", name, *path)).rank:
            stronger.append(Assignment(tuple(path), {} if isinstance(value, dict) else value, origin))
    return sorted(stronger, key=lambda one: len(one.path))


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
    replay = "trainer.model.router_replay"
    if str(state.get(replay)).lower() in ("true", "1"):
        state.fill("inference.enable_return_routed_experts", True, state.origin(replay))
    if number(state, "max_restarts"):  # wait for the server as long as for its first start
        key = "wait_timeout_seconds"
        longest = state.get(f"orchestrator.{key}", OrchestratorConfig.model_fields[key].default)
        state.fill("orchestrator.client.reconnect_seconds", longest, state.origin("max_restarts"))
    elif is_over_nodes(state):  # wait for a lost connection as long as for a heartbeat
        key = "dead_after_seconds"
        longest = state.get(f"heartbeat.{key}", HeartbeatConfig.model_fields[key].default)
        state.fill("orchestrator.client.reconnect_seconds", longest, state.origin("nodes"))


def _conflict(state: ConfigState, first: str, other: str, home: str | None = None) -> ConfigError:
    advice = f"set it once, with {flag(home.split('.'))}" if home else "give both the same value"
    return ConfigError(f"{state.describe(first)} and {state.describe(other)} differ; {advice}")


def _reachable(state: ConfigState, key: str) -> bool:
    """Whether all optional blocks around a key are on."""
    blocks = key.split(".")[:-1]
    optional = ("inference", "ckpt", *METRIC_LOGGERS)
    ends = (length for length, block in enumerate(blocks, start=1) if block in optional)
    return all(state.is_on(tuple(blocks[:end])) for end in ends)


def assign_gpus(state: ConfigState) -> None:
    """Convert GPU counts into ids, and the ids of inference into its data parallelism.

    Raises:
        ConfigError: counts, ids and parallelism contradict each other.
    """
    over_nodes = is_over_nodes(state)
    spans_nodes = over_nodes and state.is_set("inference.parallel.dp_local")
    copies_key = "dp_local" if spans_nodes else "dp"
    tp, copies = (number(state, f"inference.parallel.{key}") for key in ("tp", copies_key))
    serves = state.is_on("inference")
    needed = (tp or 1) * copies if serves and copies is not None else None
    copies_origin = state.origin(f"inference.parallel.{copies_key}")
    given = [state.origin(key).rank for key in ("inference_gpus", "inference_gpu_ids") if state.is_set(key)]
    if needed is not None and given and copies_origin.rank > max(given):
        state.put("inference_gpus", needed, copies_origin)
    _ids_from_count(state, "inference", 0, needed)
    ids = ids_of(state, "inference_gpu_ids", [0])
    start = 0 if over_nodes and not has_shared_nodes(state) else max(ids, default=-1) + 1
    _ids_from_count(state, "trainer", start, 1 if needed is not None or over_nodes else None)
    if not serves:
        return
    degree, rest = divmod(len(ids), tp or 1)
    weaker = copies_origin.rank < state.origin("inference_gpu_ids").rank
    if rest or (copies is not None and copies != degree and not weaker):
        parallel = f"tp * {copies_key} = {tp or 1} * {copies}" if copies is not None else f"tp = {tp}"
        raise ConfigError(
            f"inference has {len(ids)} GPUs ({state.origin('inference_gpu_ids').label}) but inference.parallel."
            f"{parallel}; set --inference-gpus or --inference.parallel.{copies_key.replace('_', '-')}"
        )
    state.put(f"inference.parallel.{copies_key}", degree, state.origin("inference_gpu_ids"))
    if spans_nodes:
        _share_server(state, degree)


def _share_server(state: ConfigState, degree: int) -> None:
    """Complete a server over all inference nodes, which has `degree` copies of the model on each."""
    dp, nodes = number(state, "inference.parallel.dp"), number(state, "inference_nodes") or 1
    if dp is not None and dp != degree * nodes:
        raise ConfigError(
            f"{state.describe('inference.parallel.dp')} is not dp_local * inference_nodes = {degree} * {nodes}; remove "
            "dp, or set --inference-nodes"
        )
    state.put("inference.parallel.dp", degree * nodes, state.origin("inference.parallel.dp_local"))
    listed = state.get("nodes")
    first = listed.split(",")[0] if isinstance(listed, str) else listed[0]
    state.put("inference.parallel.address", first, state.origin("nodes"))


def is_over_nodes(state: ConfigState) -> bool:
    """Whether the run has several nodes."""
    return bool(state.get("nodes", None)) or (number(state, "slurm.nodes") or 1) > 1


def has_shared_nodes(state: ConfigState) -> bool:
    """Whether some of several nodes have inference and trainer; with `nodes = slurm`, whether they may."""
    listed = state.get("nodes", None) or []
    names = listed.split(",") if isinstance(listed, str) else listed
    prefix = "" if names else "slurm."
    total = len(names) if names else number(state, "slurm.nodes") or 1
    servers, trainers = (number(state, f"{prefix}{role}_nodes") for role in ("inference", "trainer"))
    return trainers is not None and (servers or 1) + trainers > total


def _ids_from_count(state: ConfigState, role: str, start: int, needed: int | None) -> None:
    """Convert `<role>_gpus` (or the GPUs `needed` by the parallel degrees) into `<role>_gpu_ids`.

    Of ids and a count that differ, the stronger source counts. None is not given.
    """
    count_key, ids_key = f"{role}_gpus", f"{role}_gpu_ids"
    if state.get(ids_key) is None:
        state.remove(ids_key)
    count, origin, ids_origin = number(state, count_key), state.origin(count_key), state.origin(ids_key)
    if count is None:
        if state.is_set(ids_key) or (needed is None and start <= 1):
            return
        count, origin = needed or 1, DEFAULT
    if count < 1:
        raise ConfigError(f"{state.describe(count_key)}: input should be greater than or equal to 1")
    if state.is_set(ids_key) and len(ids_of(state, ids_key, [])) != count:
        if origin.rank == ids_origin.rank:
            raise ConfigError(
                f"{state.describe(count_key)} and {state.describe(ids_key)} differ; give only one of them"
            )
        if origin.rank > ids_origin.rank:
            state.remove(ids_key)
    state.fill(ids_key, list(range(start, start + count)), origin)
    state.put(count_key, None, origin)


def number(state: ConfigState, key: str) -> int | None:
    """Return a whole number; None if it is missing or, which pydantic reports, of a wrong type."""
    text = str(state.get(key)).strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def ids_of(state: ConfigState, key: str, default: list[int]) -> list[int]:
    """Return the device ids of a key, without entries of a wrong type, which pydantic reports."""
    value = state.get(key, default)
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [int(item) for item in items if str(item).strip().lstrip("-").isdigit()]
