"""Checks at the start that the nodes of a trainer share a directory, and names a lost node in errors (I7)."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from loguru import logger

from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.fs_consistency import visibility_timeout
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import is_restart
from prime_rl.storage.wait_for import DeadlineError, wait_for
from prime_rl.trainer.checkpoints.rank_consensus import RankConsensus
from prime_rl.trainer.nodes.node_monitor import NodeMonitor
from prime_rl.trainer.parallel.process_group import World, wrap_rank_errors
from prime_rl.trainer.process_setup import check_writable


@dataclass(frozen=True, slots=True)
class _Node:
    """What the first rank of a node reports at the start; `main_address` is that by which the node reaches rank 0."""

    rank: int
    host: str
    directory: str
    sees_file: bool
    family: int
    main_address: str


@dataclass(frozen=True, slots=True)
class DirectoryUse:
    """How the ranks use the run directory.

    Attributes:
        num_writers: the first ranks, which have the directory in which versions are published.
        is_main: whether this rank is the first one that uses its directory.
    """

    num_writers: int
    is_main: bool


@contextmanager
def join_nodes(
    paths: RunPaths,
    world: World,
    heartbeat: HeartbeatWriter,
    limits: HeartbeatLimits | None = None,
    is_shared: bool = True,
) -> Iterator[DirectoryUse]:
    """Compare the run directories of the trainer's nodes if they are shared, and monitor the nodes.

    A silent node is logged, is part of the heartbeats, and is named in the error of a step that waits for it.

    Raises:
        ConfigError: the nodes have different directories although these should be shared.
        RunError: an error of a rank, with the names of silent nodes.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) == world.size:
        yield DirectoryUse(world.size, world.is_main)
        return
    assert dist.group.WORLD is not None
    ranks, local_rank = RankConsensus(world, dist.group.WORLD), int(os.environ["LOCAL_RANK"])
    token = ranks.on_main(lambda: secrets.token_hex(16))
    nodes = _compare_directories(paths, world, ranks, token, local_rank, is_shared)
    monitor = _make_monitor(world, ranks, token, nodes, local_rank, heartbeat, limits or HeartbeatLimits())
    if monitor is not None:
        monitor.start()
    try:
        with wrap_rank_errors(world.timeout_s):
            first_node = nodes[1].rank
            yield DirectoryUse(world.size, world.is_main) if is_shared else DirectoryUse(first_node, local_rank == 0)
    except RunError as error:
        main = read_heartbeat(paths.heartbeat(f"trainer_{world.rank - local_rank}")) if local_rank else None
        silent = heartbeat.silent_hosts if main is None else main.silent_hosts
        if not silent:
            raise
        names = ", ".join(silent)
        raise RunError(f"{error}; no message from {names} for {max(silent.values()):.0f} s") from error
    finally:
        if monitor is not None:
            monitor.close()


def _compare_directories(
    paths: RunPaths, world: World, ranks: RankConsensus, token: str, local_rank: int, is_shared: bool
) -> list[_Node]:
    """Return the nodes; if `is_shared`, raise ConfigError on all ranks if one does not see a file of rank 0."""
    file, host = paths.root / f".shared_directory_{token[:8]}", socket.gethostname()
    patience_s = min(visibility_timeout(file, paths.fs_consistency_timeout_seconds), world.timeout_s / 2)

    def look() -> _Node | None:
        if local_rank:
            return None
        with translate_error(ConfigError, lambda error: ConfigError(f"{error} (on {host})")):
            check_writable("output_dir", paths.root)
        if not is_shared and is_restart():
            raise ConfigError("nodes_share_directory = false: the trainer cannot be restarted; start a new run")
        family, *_, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_DGRAM)[0]
        sees_file = True
        if is_shared:
            try:
                wait_for(file, patience_s, "rank 0")
            except DeadlineError:
                sees_file = False
        return _Node(world.rank, host, str(paths.root), sees_file, family, str(address[0]))

    def write() -> None:
        check_writable("output_dir", paths.root)
        file.touch()

    try:
        ranks.on_main(write)
        nodes = [node for node in ranks.gather(look) if node is not None]
    finally:
        if world.is_main:
            file.unlink(missing_ok=True)
    for node in nodes:
        if not node.sees_file:
            main, waited = nodes[0], f" within {patience_s:g} s" if patience_s else ""
            raise ConfigError(
                f"output_dir: {node.directory} on {node.host} is not {main.directory} on {main.host}: new files do not "
                f"appear there{waited}; the nodes of a trainer need a shared directory, or relays and "
                "nodes_share_directory = false"
            )
    return nodes


def _make_monitor(
    world: World,
    ranks: RankConsensus,
    token: str,
    nodes: list[_Node],
    local_rank: int,
    heartbeat: HeartbeatWriter,
    limits: HeartbeatLimits,
) -> NodeMonitor | None:
    """Create the monitor of this node, on its first rank; None if the address of rank 0 cannot be used."""
    sock = socket.socket(socket.AddressFamily(nodes[1].family), socket.SOCK_DGRAM)

    def bind() -> Any:
        # The other nodes' address of rank 0: its own may be that of the loopback interface.
        address = nodes[1].main_address
        try:
            sock.bind((address, 0))
        except OSError as error:
            logger.warning(
                "{} (MASTER_ADDR) is not an address of this node, so a lost node is not named: {}", address, error
            )
            return None
        return sock.getsockname()

    hub = ranks.on_main(bind)
    if hub is None or local_rank:
        sock.close()
        return None
    index = [node.rank for node in nodes].index(world.rank)
    hosts = [node.host for node in nodes]
    limit = f"a step that needs it waits up to {world.timeout_s:g} s (dist_timeout_seconds)"
    return NodeMonitor(sock, hub, token, hosts, index, limits.warn_after_seconds, limit, heartbeat.report_silent_hosts)
