"""Writes what the trainer computes for each token of a batch to `rollouts/step_n/train.safetensors`, every N steps.

    logprobs, ratio, entropy   float32 [T] of the forward pass before the token's update; 0 where it is not trained
    clipped, masked            uint8 [T], 1 where the loss clips the token's gradient, or omits the token

Entry t describes the same token as entry t of `rows.safetensors` (`prime_rl.storage.batch`), whose rows are kept for as
long as the export. Training does not wait for the disk: one thread writes, and exports that it cannot write in time are
dropped and counted.
"""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from safetensors.numpy import save

from prime_rl.configs.trainer import TokenExportConfig
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.storage.batch import TRAIN_FILE, delete_rows, keep_shown_tokens
from prime_rl.storage.paths import RunPaths, step_of
from prime_rl.trainer.losses.loss_inputs import LossInputs, LossOutput, finite, log_ratio
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.train_step import ScoredRow

FORMAT = "prime_rl.train_tokens/1"
NAMES = ("logprobs", "ratio", "entropy", "clipped", "masked")
_FLAGS = ("clipped", "masked")
_MAX_QUEUED = 2
_CLOSE_SECONDS = 60.0


class TokenExporter:
    """Collects the values of the rows of a step on all ranks; rank 0 writes them.

    Args:
        config: None exports nothing.
        first_needed_rows: returns the first step whose rows are needed for other reasons; None keeps all rows.
    """

    def __init__(
        self,
        config: TokenExportConfig | None,
        paths: RunPaths,
        world: World,
        first_needed_rows: Callable[[], int] | None = None,
    ) -> None:
        self.num_dropped = 0
        """Exports that were not written."""
        self._config, self._paths, self._world, self._first_needed_rows = config, paths, world, first_needed_rows
        self._rows: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        self._is_due = False
        self._pending: set[int] = set()
        self._queue: queue.Queue[tuple[int, NDArray[np.float32]] | None] = queue.Queue(_MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def start_step(self, step: int) -> None:
        """Collect the rows that follow if step `step` is due."""
        self._rows.clear()
        self._is_due = self._config is not None and step % self._config.interval == 0

    @torch.no_grad()
    def add(self, scored: ScoredRow, inputs: LossInputs, output: LossOutput) -> None:
        """Collect the values of a row of the step."""
        if not self._is_due or scored.row.positions is None:
            return
        mask = scored.row.loss_mask
        ratio = log_ratio(replace(inputs, mask=mask)).exp()
        values = (
            finite(scored.logprobs), ratio, scored.entropy, output.low | output.high, output.masked,
        )  # fmt: skip
        table = torch.stack([torch.where(mask, value.detach().float(), 0.0) for value in values])
        self._rows.append((scored.row.positions, table.cpu().numpy()))

    def finish_step(self, step: int, num_tokens: int) -> None:
        """Gather the rows of all ranks, which call it together, and have rank 0 write them."""
        if not self._is_due:
            return
        table = np.zeros((len(NAMES), num_tokens), np.float32)
        if self._world.rank % self._world.model_parallel_size == 0:  # ranks that work on the same rows count once
            for positions, values in self._rows:
                table[:, positions] = values
        self._rows.clear()
        table = self._world.sum(torch.from_numpy(table).to(self._world.device)).cpu().numpy()
        if not self._world.is_main:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="token-export", daemon=True)
            self._thread.start()
        self._pending.add(step)
        try:
            self._queue.put_nowait((step, table))
        except queue.Full:
            self._drop(step, "the disk is slower than training")

    def keeps_rows(self, step: int) -> bool:
        """Return whether the rows of a step belong to an export."""
        return step in self._pending or (self._paths.rollouts(step) / TRAIN_FILE).exists()

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write what is queued, for at most `timeout_seconds` seconds."""
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=timeout_seconds)
            except queue.Full:
                return
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            step, table = job
            try:
                self._write(step, table)
                self._pending.discard(step)
                self._remove_old()
            except OSError as error:
                self._drop(step, summarize_os_error(error, self._paths.rollouts_dir))
                self._delete_rows(step)  # they may have been kept for the export until now

    def _write(self, step: int, table: NDArray[np.float32]) -> None:
        target = self._paths.rollouts(step) / TRAIN_FILE
        values = dict(zip(NAMES, table, strict=True))
        arrays = {name: value.astype(np.uint8 if name in _FLAGS else np.float32) for name, value in values.items()}
        temporary = target.with_name(f".tmp-{TRAIN_FILE}-{os.getpid()}")
        try:
            temporary.write_bytes(save(arrays, {"format": FORMAT, "step": str(step)}))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """Remove exports beyond `keep_last`, and their rows unless those are needed."""
        assert self._config is not None
        files = self._paths.rollouts_dir.glob(f"step_*/{TRAIN_FILE}")
        steps = sorted(step for file in files if (step := step_of(file.parent)) is not None)
        for step in steps[: -self._config.keep_last] if self._config.keep_last is not None else ():
            keep_shown_tokens(self._paths.rollouts(step))
            (self._paths.rollouts(step) / TRAIN_FILE).unlink(missing_ok=True)
            self._delete_rows(step)

    def _delete_rows(self, step: int) -> None:
        if self._first_needed_rows is not None and step < self._first_needed_rows():
            with suppress(OSError):
                delete_rows(self._paths, below=step + 1, first=step)

    def _drop(self, step: int, reason: str) -> None:
        self._pending.discard(step)
        self.num_dropped += 1
        logger.warning("token_export: step {} is not exported ({} so far): {}", step, self.num_dropped, reason)
