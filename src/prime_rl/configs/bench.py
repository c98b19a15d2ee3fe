"""`--bench`: a few steps in a separate directory, so that a benchmark never overwrites the run."""

from typing import Any

from prime_rl.configs.loading.provenance import MISSING, ConfigState, Origin, Rank

WARMUP_STEPS = 1
"""Steps that are not counted: they compile, allocate and fill caches."""
STEPS = 4
"""Default of `bench_steps`."""
_FLAG = Origin(Rank.DEFAULT, "--bench")


def limit_to_bench_steps(state: ConfigState, *prefixes: str) -> None:
    """Set `max_steps`, at the top or under the `prefixes`, to `bench_steps`."""
    for prefix in prefixes or ("",):
        if is_bench(state):
            state.put(f"{prefix}max_steps", state.get("bench_steps", STEPS), _FLAG)


def use_fake_data(state: ConfigState, prefix: str = "", **values: Any) -> None:
    """Train on random batches: complete `data.fake`, under the prefix of the trainer, with `values`."""
    if not is_bench(state):
        return
    block = f"{prefix}data.fake"
    if not state.is_on(block):
        state.put(block, {}, _FLAG)
    for key, value in values.items():
        state.fill(f"{block}.{key}", value, _FLAG)


def sample_without_trainer(state: ConfigState, batch_size: int) -> None:
    """Sample every batch from the base model, because no trainer publishes versions.

    One batch is in flight unless `max_concurrent` is set, so that batches follow each other as in a run; its default
    size is `batch_size`.
    """
    if not is_bench(state):
        return
    if state.get("max_concurrent", None) is None:
        state.put("max_concurrent", state.get("batch_size", batch_size), _FLAG)
    state.put("async_level", state.get("max_steps"), _FLAG)
    for key in ("max_off_policy_steps", "eval", "val"):
        if state.get(key) not in (MISSING, None):
            state.put(key, None, _FLAG)


def is_bench(state: ConfigState) -> bool:
    """Whether `bench` is on, in any spelling of true."""
    return str(state.get("bench")).lower() in ("true", "1")
