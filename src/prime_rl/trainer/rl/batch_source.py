"""Reading the batch of a step, and dividing it into this rank's micro-batches."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.storage.artifact import retry_until_complete, visibility_timeout
from prime_rl.storage.batch import OPTIONAL_ARRAYS, Batch, read_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import branch_of_batch
from prime_rl.storage.wait_for import DeadlineError, wait_in_turns
from prime_rl.trainer.micro_batch import PADDING_ROW, MicroBatch, assign_rows, make_micro_batch, masked_row
from prime_rl.trainer.model.routing import RouterReplay
from prime_rl.trainer.parallel.process_group import ALONE, Arrays, NodeRanks, World
from prime_rl.trainer.process_setup import StopRequest
from prime_rl.trainer.train_step import Counts, Minibatch


class BatchSource:
    """Waits for the orchestrator's batches in the run directory; with `data.fake` draws random batches instead.

    The first rank of each node waits and reads for the others, which take part in a collective at least four times a
    second. So an error or a stop request of one rank ends the wait of all ranks of the node (I7).
    """

    def __init__(
        self,
        config: TrainerConfig,
        paths: RunPaths,
        vocabulary: int,
        check_publisher: Callable[[], None],
        heartbeat: HeartbeatWriter,
        branch: int | None = None,
        check_first: Callable[[Mapping[str, Any]], None] = lambda _: None,
        stop: StopRequest | None = None,
        world: World = ALONE,
        node: NodeRanks | None = None,
        replay: RouterReplay | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            vocabulary: fake tokens are drawn below it.
            check_publisher: raises the errors of the publisher. It is called while waiting, because the batch may never
                arrive without the version.
            branch: read only batches of this branch; None reads any. After a rollback of the trainer, an orchestrator
                that has not noticed it may still write batches of the old branch, which it archives later.
            check_first: called with the manifest of batch 0.
            stop: ends a wait.
            world: all ranks.
            node: the ranks of this node; None is this rank alone.
            replay: of the policy; fake batches have records for it.
        """
        self._config, self._paths, self._vocabulary, self._branch = config, paths, vocabulary, branch
        self._check_publisher, self._heartbeat, self._check_first = check_publisher, heartbeat, check_first
        self._stop, self._world, self._node = stop, world, node or NodeRanks(ALONE)
        self._replay = replay
        self._orchestrator = _orchestrator_monitor(config, paths)
        self._monitors_peer = _monitors_peer()

    def read(self, step: int) -> Batch | None:
        """Return batch `step`, waiting until it exists; None if the trainer stops before it. All ranks call it.

        Raises:
            ConfigError: the orchestrator uses another `async_level`.
            DeadlineError: the batch did not appear in time.
            RunError: the orchestrator died, publishing failed, or the batch is damaged, perhaps on another node.
        """
        config = self._config
        path = self._paths.rollouts(step)
        if config.data.fake is None:
            self._wait(path, step)
        if self._stop is not None and self._stop.agree(step):
            return None
        if config.data.fake is not None:
            batch = fake_batch(config.data.fake, self._vocabulary, config.model.seq_len, config.seed, step)
            routes = None if self._replay is None else fake_routes(batch.seq_lens, self._replay, config.seed, step)
            return replace(batch, routed_experts=routes)
        load = partial(load_batch, config, step, self._node, self._check_publisher)
        batch, manifest = load() if self._node.is_everyone else self._world.run_on_all(load, f"reading {path}")
        if step == 0:
            self._check_first(manifest)
        return batch

    def _wait(self, path: Path, step: int) -> None:
        timeout_seconds = self._config.wait_timeout_seconds
        self._heartbeat.enter(f"wait for batch {step}", timeout_seconds, "orchestrator", step=step)
        turns = self._turns(path, step, timeout_seconds) if self._node.is_first else self._turns_of_others(step)
        while not any(self._node.gather(partial(next, turns))):
            pass

    def _turns_of_others(self, step: int) -> Iterator[bool]:
        """Yield whether this rank has a request to stop, of which the first rank of the node may not know."""
        while True:
            self._check_publisher()
            yield self._stop is not None and self._stop.is_requested(step)

    def _turns(self, path: Path, step: int, timeout_seconds: float) -> Iterator[bool]:
        """Yield at least four times a second whether the batch exists, or the trainer is to stop before it."""
        if self._monitors_peer:
            self._orchestrator.compare()  # also if the batch exists already
        what = f"{path}, which the orchestrator{self._paths.log_hint('orchestrator')} should have written"

        def is_over() -> bool:
            if self._stop is not None and self._stop.is_requested(step):
                return True
            return path.exists() and self._branch in (None, branch_of_batch(path))

        try:
            for _ in wait_in_turns(path.parent, is_over, timeout_seconds, what, self._check):
                yield False
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {self._orchestrator.describe()}") from None
        yield True

    def _check(self) -> None:
        self._check_publisher()
        if self._monitors_peer:
            self._orchestrator.check()


def load_batch(
    config: TrainerConfig, step: int, node: NodeRanks, check: Callable[[], None] = lambda: None
) -> tuple[Batch, dict[str, Any]]:
    """Return batch `step`, which exists, and its manifest, on all ranks of a node; its first rank reads them.

    `check` is called while the files are incomplete. All ranks of the node raise ConfigError if the orchestrator uses
    another `async_level`, and RunError if the batch is damaged.
    """

    def read() -> tuple[Arrays, dict[str, Any]]:
        batch, manifest = _read_batch(config, step, check)
        unused = set() if config.model.router_replay else {"routed_experts"}
        return {name: array for name, array in batch.arrays.items() if name not in unused}, manifest

    arrays, manifest = node.share(read)
    return Batch(**arrays, sources=manifest.get("sources", {})), manifest


def _read_batch(config: TrainerConfig, step: int, check: Callable[[], None]) -> tuple[Batch, dict[str, Any]]:
    paths = config.run_paths
    path = paths.rollouts(step)
    visible_seconds = visibility_timeout(path, paths.fs_consistency_timeout_seconds)
    batch, manifest = retry_until_complete(partial(read_batch, path, step), visible_seconds, check)
    if (theirs := manifest.get("async_level")) != config.async_level:
        raise ConfigError(
            f"async_level = {config.async_level} here and {theirs} at the orchestrator that wrote "
            f"{path}; give both the same with --async-level"
        )
    return batch, manifest


def compare_with_orchestrator(config: TrainerConfig) -> None:
    """Raise ConfigError if an orchestrator is seen alive and has other settings, unless `rl` started this process.

    It is called before anything in the run directory changes: a trainer with wrong settings does not roll a run back.
    """
    if config.data.fake is None and _monitors_peer():
        _orchestrator_monitor(config, config.run_paths).compare()


def _orchestrator_monitor(config: TrainerConfig, paths: RunPaths) -> PeerMonitor:
    limits, standalone = config.heartbeat.limits, not is_supervised()
    return PeerMonitor(paths, "orchestrator", limits, raises=standalone, settings=config.run_settings)


def _monitors_peer() -> bool:
    """One rank of each node monitors the orchestrator; torchrun ends the other ranks together with it."""
    return not int(os.environ.get("LOCAL_RANK", 0))


def split_batch(batch: Batch, step: int, minibatches: int, world: World, max_tokens: int) -> list[Minibatch]:
    """Split a batch into minibatches and take this rank's rows of each.

    The rows of a minibatch do not depend on the world size (I9). A batch with fewer rows than `minibatches` gives one
    minibatch per row. Rows that fit into `max_tokens` together are concatenated to one micro-batch, which changes only
    the number of forward passes.
    """
    return [_minibatch(batch, step, part, world, max_tokens) for part in _rows_of_minibatches(batch, minibatches)]


def split_rows(batch: Batch, minibatches: int, max_tokens: int) -> list[tuple[list[list[int]], Counts]]:
    """Split a batch as `split_batch`, for ranks that share the rows with other runs.

    Returns for each minibatch the rows of its micro-batches, and its counts.
    """
    parts = _rows_of_minibatches(batch, minibatches)
    return [
        ([part[cut] for cut in _cut_micro_batches(batch, [part], max_tokens)], _count(batch, part)) for part in parts
    ]


def _rows_of_minibatches(batch: Batch, minibatches: int) -> list[list[int]]:
    parts = [[row for row in part if row != PADDING_ROW] for part in assign_rows(batch.row_cost, minibatches)]
    return [part for part in parts if part]


def fake_batch(config: FakeDataConfig, vocabulary: int, row_length: int, seed: int, step: int) -> Batch:
    """Draw a random batch, a function of `seed` and `step`: the second half of each rollout is trained."""
    random = np.random.default_rng([seed, step])
    size, longest = config.batch_size, min(config.seq_len, row_length)
    lengths = random.integers(2, longest + 1, size) if config.variable_length else np.full(size, longest)
    lengths = np.sort(lengths)[::-1]  # rows by descending cost, as the orchestrator packs them
    per_row = max(1, min(config.micro_batch_size, row_length // longest))
    rows = [lengths[i : i + per_row] for i in range(0, size, per_row)]
    total = int(lengths.sum())
    index = np.concatenate([np.arange(n) for n in lengths])
    mask = index >= np.repeat(np.maximum(1, lengths // 2), lengths)
    return Batch(
        tokens=random.integers(0, vocabulary, total, dtype=np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        advantages=np.repeat(random.standard_normal(size), lengths).astype(np.float32),
        versions=np.where(mask, step, -1).astype(np.int32),
        temperature=np.ones(total, np.float32),
        segment_ids=np.concatenate([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum([row.sum() for row in rows])]).astype(np.int64),
        row_cost=np.array([row.sum() for row in rows], np.float32),
        seq_lens=lengths.astype(np.int32),
        sample_group=np.arange(size, dtype=np.int64),
        sample_rollout=np.zeros(size, np.int32),
    )


def fake_routes(lengths: NDArray[np.integer], replay: RouterReplay, seed: int, step: int) -> NDArray[Any]:
    """Draw records [T, L, k] for samples of `lengths` tokens, a function of `seed` and `step`."""
    random, count = np.random.default_rng([seed, step, 1]), min(replay.num_experts.values())
    draw = partial(random.integers, size=(int(np.sum(lengths)), replay.num_layers, 1), dtype=np.uint16)
    ids = (draw(0, count) + draw(1, count // replay.top_k + 1) * np.arange(replay.top_k, dtype=np.uint16)) % count
    ids[np.cumsum(lengths) - 1] = 0
    return ids.astype(np.uint8) if count <= 256 else ids


def _minibatch(batch: Batch, step: int, rows: Sequence[int], world: World, max_tokens: int) -> Minibatch:
    assigned = assign_rows(batch.row_cost[list(rows)], world.data_size, step)
    rows_of_rank = [[rows[i] for i in indices if i != PADDING_ROW] for indices in assigned]
    own_rows = rows_of_rank[world.data_rank]
    parts = [own_rows[part] for part in _cut_micro_batches(batch, rows_of_rank, max_tokens)]
    streams = {name: array[:0] for name, array in batch.arrays.items() if name in OPTIONAL_ARRAYS}
    return Minibatch(
        rows=[make_row(batch, part, step) if part else masked_row(streams) for part in parts],
        counts=_count(batch, rows),
    )


def _count(batch: Batch, rows: Sequence[int]) -> Counts:
    """Count what is trained in `rows`, on all ranks. Each count is at least 1, since it is a divisor."""
    trained = _gather(batch, batch.loss_mask, rows) != 0

    def weighted(weights: NDArray[Any] | None) -> int:
        return 1 if weights is None else max(1, int(np.sum(trained & (_gather(batch, weights, rows) != 0))))

    return Counts(
        tokens=weighted(batch.loss_mask if batch.rl_weights is None else batch.rl_weights),
        sequences=sum(len(np.unique(batch.segment_ids[batch.row(row)])) for row in rows),
        ce_tokens=weighted(batch.ce_weights),
        ref_kl_tokens=weighted(batch.ref_kl_weights),
    )


def _gather(batch: Batch, array: NDArray[Any], rows: Sequence[int]) -> NDArray[Any]:
    return np.concatenate([array[batch.row(row)] for row in rows])


def _cut_micro_batches(batch: Batch, rows_of_rank: Sequence[Sequence[int]], max_tokens: int) -> list[slice]:
    """Cut the ranks' rows into micro-batches of at most `max_tokens`, at the same positions on every rank.

    The i-th rows of all ranks have about the same cost, so the i-th micro-batches do too, and no rank waits long. A row
    that is longer than `max_tokens` is a micro-batch.
    """
    lengths = np.zeros((len(rows_of_rank), max(map(len, rows_of_rank))), np.int64)
    for rank, rows in enumerate(rows_of_rank):
        lengths[rank, : len(rows)] = np.diff(batch.row_offsets)[list(rows)]
    starts: list[int] = []
    free = np.full(len(rows_of_rank), -1)
    for position, needed in enumerate(lengths.T):
        if (needed > free).any():
            starts.append(position)
            free = np.full(len(rows_of_rank), max_tokens)
        free = free - needed
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], lengths.shape[1]], strict=True)]


def make_row(batch: Batch, rows: Sequence[int], step: int) -> MicroBatch:
    """Concatenate rows of batch `step` to one micro-batch."""
    gather = partial(_gather, batch, rows=rows)
    lengths = np.concatenate([np.bincount(batch.segment_ids[batch.row(row)]) for row in rows])
    sampled = gather(batch.loss_mask) != 0
    starts = np.cumsum(lengths) - lengths
    older = np.add.reduceat(sampled & (gather(batch.versions) != step), starts, dtype=np.int64)
    return make_micro_batch(
        gather(batch.tokens),
        sampled,
        lengths,
        **{name: gather(getattr(batch, name)) for name in ("logprobs", "advantages", "temperature")},
        on_policy=np.repeat(older == 0, lengths),
        streams={name: gather(array) for name, array in batch.arrays.items() if name in OPTIONAL_ARRAYS},
        positions=np.concatenate([np.arange(batch.row_offsets[row], batch.row_offsets[row + 1]) for row in rows]),
    )
