"""Which GPUs each process of `rl` gets: counts become device ids, inference first."""

from prime_rl.core.errors import ConfigError
from prime_rl.loading.provenance import DEFAULT, ConfigState


def assign_gpus(state: ConfigState) -> None:
    """Convert GPU counts into ids, inference first, and the ids of inference into its data parallelism.

    Raises:
        ConfigError: counts, ids and parallelism contradict each other.
    """
    tp, dp = (number(state, f"inference.parallel.{key}") for key in ("tp", "dp"))
    serves = state.is_on("inference")
    needed = (tp or 1) * dp if serves and dp is not None else None
    _ids_from_count(state, "inference", 0, needed)
    ids = ids_of(state, "inference_gpu_ids", [0])
    _ids_from_count(state, "trainer", max(ids, default=-1) + 1, 1 if needed is not None else None)
    if not serves:
        return
    degree, rest = divmod(len(ids), tp or 1)
    if rest or (dp is not None and dp != degree):
        parallel = f"tp * dp = {tp or 1} * {dp}" if dp is not None else f"tp = {tp}"
        raise ConfigError(
            f"inference has {len(ids)} GPUs ({state.origin('inference_gpu_ids').label}) but inference.parallel."
            f"{parallel}; set --inference-gpus or --inference.parallel.dp"
        )
    state.put("inference.parallel.dp", degree, state.origin("inference_gpu_ids"))


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
