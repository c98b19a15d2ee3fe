"""Which GPUs each process of `rl` gets: counts become device ids, inference first.

On several nodes inference and trainer have their own, so that both count from 0 on each node.
"""

from prime_rl.core.errors import ConfigError
from prime_rl.loading.provenance import DEFAULT, ConfigState


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
    _ids_from_count(state, "inference", 0, needed)
    ids = ids_of(state, "inference_gpu_ids", [0])
    start = 0 if over_nodes else max(ids, default=-1) + 1
    _ids_from_count(state, "trainer", start, 1 if needed is not None or over_nodes else None)
    if not serves:
        return
    degree, rest = divmod(len(ids), tp or 1)
    if rest or (copies is not None and copies != degree):
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
    """Whether inference and trainer are on nodes of their own."""
    return bool(state.get("nodes", None)) or (number(state, "slurm.nodes") or 1) > 1


def _ids_from_count(state: ConfigState, role: str, start: int, needed: int | None) -> None:
    """Convert `<role>_gpus` (or the GPUs `needed` by the parallel degrees) into `<role>_gpu_ids`."""
    count_key, ids_key = f"{role}_gpus", f"{role}_gpu_ids"
    count, origin = number(state, count_key), state.origin(count_key)
    if count is None:
        if state.is_set(ids_key) or (needed is None and start <= 1):
            return
        count, origin = needed or 1, DEFAULT
    if state.is_set(ids_key) and len(ids_of(state, ids_key, [])) != count:
        raise ConfigError(f"{state.describe(count_key)} and {state.describe(ids_key)} differ; give only one of them")
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
