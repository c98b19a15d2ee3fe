"""The start of a rank, before it imports torch for seconds: its log, the lock of the directory, and its heartbeat."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

from prime_rl.configs.logging import LogConfig
from prime_rl.configs.training.broadcast import ALLOCATOR_VARIABLES
from prime_rl.core.logs import set_up_logging
from prime_rl.liveness.heartbeat_monitor import remove_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import LAUNCHER, die_with_parent, is_supervised
from prime_rl.liveness.run_settings import RunSettings
from prime_rl.storage.file_locks import hold_role_lock
from prime_rl.storage.paths import RunPaths


def expand_segments(transport: str) -> None:
    """Let torch's CUDA allocator expand its segments, against fragmentation, unless the user has configured it.

    The transport `ipc` cannot share such memory. torch reads the variable before its first allocation on a GPU.
    """
    if transport != "ipc" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def start_rank(
    log: LogConfig,
    paths: RunPaths,
    role: str = "trainer",
    settings: RunSettings = MappingProxyType({}),
    transport: str = "filesystem",
) -> Iterator[HeartbeatWriter]:
    """Prepare this process, with or without torchrun, and write its heartbeat while the block runs.

    It logs to the file of `role`. Rank 0 holds the lock of the directory until it ends. `transport` is that of the
    weights (`weight_broadcast.type`).
    """
    expand_segments(transport)
    if is_supervised():
        launcher = os.environ.get(LAUNCHER)
        die_with_parent(int(launcher) if launcher else None)
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    set_up_logging(log.level, log.utc, paths.log(f"{role}_rank_{rank}" if size > 1 else role) if log.file else None)
    if not rank:
        hold_role_lock(paths, role)
        remove_heartbeats(paths, "trainer", [f"trainer_{one}" for one in range(size)])
    # Longer with many ranks, to limit the load on the file system; well below `heartbeat.warn_after_seconds`.
    interval_seconds = min(3.0, max(1.0, size / 64))
    heartbeat = HeartbeatWriter(paths, f"trainer_{rank}", "trainer", interval_seconds, settings)
    heartbeat.enter_imports("torch")
    with heartbeat:
        yield heartbeat
