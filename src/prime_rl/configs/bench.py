"""`--bench`: a few steps in a folder of their own, so that a benchmark never meets the run that it stands beside."""

from typing import Any

from prime_rl.configs.state import MISSING, Origin, Rank, State

WARMUP_STEPS = 1
"""Steps that are not counted: they compile, allocate, and fill caches."""
STEPS = 4
"""Default of `bench_steps`."""
_FLAG = Origin(Rank.DEFAULT, "--bench")


def shorten(state: State, *prefixes: str) -> None:
    """Cut the run to `bench_steps` steps, whatever `max_steps` says there or under the `prefixes`."""
    if is_bench(state):
        steps = state.get("bench_steps")
        for prefix in prefixes or ("",):
            state.put(f"{prefix}max_steps", STEPS if steps is MISSING else steps, _FLAG)


def use_fake_data(state: State, prefix: str = "", **values: Any) -> None:
    """Give the trainer random batches, with `values` where no source says otherwise.

    Args:
        state: changed in place.
        prefix: of the trainer's keys, such as `trainer.`.
        values: keys of `data.fake`.
    """
    if not is_bench(state):
        return
    block = f"{prefix}data.fake"
    if not isinstance(state.get(block), dict):
        state.put(block, {}, _FLAG)
    for key, value in values.items():
        if not state.is_set(f"{block}.{key}"):
            state.put(f"{block}.{key}", value, _FLAG)


def sample_alone(state: State, batch_size: int) -> None:
    """Let the orchestrator sample every batch from the base model: there is no trainer that it could wait for.

    One batch is in flight unless `max_concurrent` says otherwise, so that batches follow each other as in a run.

    Args:
        state: changed in place.
        batch_size: rollouts in a batch, where no source says.
    """
    if not is_bench(state):
        return
    if state.get("max_concurrent") in (MISSING, None):
        state.put("max_concurrent", state.get("batch_size") if state.is_set("batch_size") else batch_size, _FLAG)
    state.put("async_level", state.get("max_steps"), _FLAG)
    for key in ("max_off_policy_steps", "eval", "val"):
        if state.get(key) not in (MISSING, None):
            state.put(key, None, _FLAG)


def is_bench(state: State) -> bool:
    """Whether `bench` is on, in any spelling of true."""
    return str(state.get("bench")).lower() in ("true", "1")
