"""Executes the operations of each model in the order of their sequence numbers; they may arrive in any order."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from prime_rl_tinker.messages import Answer, Operation

Execute = Callable[[Sequence[Operation]], Awaitable[Sequence[Answer]]]


@dataclass(slots=True)
class _Pending:
    """An operation and the future of its answer."""

    operation: Operation
    answer: asyncio.Future[Answer]


@dataclass(slots=True)
class _Queue:
    """Operations of one model: `held` waits for an earlier number, `ready` for the trainer."""

    next_seq: int
    held: dict[int, _Pending] = field(default_factory=dict)
    gap_since: float = 0.0
    ready: deque[_Pending] = field(default_factory=deque)
    is_closed: bool = False


class Sequencer:
    """Orders operations by model, and passes one of each ready model to the trainer at a time.

    A client numbers the operations of a model without gaps, but sends them in any order: the first chunk of a batch
    comes last. If a number does not arrive within `gap_seconds`, later ones that have arrived fail, and the model
    continues after them.
    """

    def __init__(self, execute: Execute, gap_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._execute, self._gap_seconds, self._clock = execute, gap_seconds, clock
        self._queues: dict[str, _Queue] = {}
        self._changed = asyncio.Event()

    def submit(self, model_id: str, seq_id: int, operation: Operation) -> asyncio.Future[Answer]:
        """Queue an operation, whose number is new; the first one of a model is 0."""
        queue = self._queues.setdefault(model_id, _Queue(0))
        pending = _Pending(operation, asyncio.get_running_loop().create_future())
        if seq_id < queue.next_seq:
            pending.answer.set_result(Answer(f"seq_id {seq_id} arrived after a later operation had failed", True))
            return pending.answer
        if not queue.held:
            queue.gap_since = self._clock()
        queue.held[seq_id] = pending
        self._advance(queue)
        self._changed.set()
        return pending.answer

    def close(self, model_id: str, last: Operation) -> asyncio.Future[Answer]:
        """Fail what waits for a model, execute `last`, and forget the model."""
        queue = self._queues.setdefault(model_id, _Queue(0))
        for pending in [*queue.ready, *queue.held.values()]:
            _fail(pending, "the model was removed")
        queue.held.clear()
        queue.is_closed = True
        closing = _Pending(last, asyncio.get_running_loop().create_future())
        queue.ready = deque([closing])
        self._changed.set()
        return closing.answer

    async def run(self) -> None:
        """Execute operations until cancelled."""
        while True:
            self._fail_behind_gaps()
            ready = [queue.ready.popleft() for queue in self._queues.values() if queue.ready]
            if not ready:
                await self._wait()
                continue
            try:
                answers = await self._execute([pending.operation for pending in ready])
            except BaseException:
                for pending in ready:
                    _fail(pending, "the trainer stopped", is_user_error=False)
                raise
            for pending, answer in zip(ready, answers, strict=True):
                if not pending.answer.done():
                    pending.answer.set_result(answer)
            self._queues = {name: one for name, one in self._queues.items() if one.ready or not one.is_closed}

    async def _wait(self) -> None:
        deadlines = [queue.gap_since + self._gap_seconds for queue in self._queues.values() if queue.held]
        timeout = max(0.0, min(deadlines) - self._clock()) if deadlines else None
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return

    def _advance(self, queue: _Queue) -> None:
        while (pending := queue.held.pop(queue.next_seq, None)) is not None:
            queue.ready.append(pending)
            queue.next_seq += 1
            queue.gap_since = self._clock()

    def _fail_behind_gaps(self) -> None:
        for queue in self._queues.values():
            if queue.held and self._clock() - queue.gap_since >= self._gap_seconds:
                missing = queue.next_seq
                for pending in queue.held.values():
                    _fail(pending, f"seq_id {missing} did not arrive within {self._gap_seconds:g} s")
                queue.next_seq = max(queue.held) + 1
                queue.held.clear()


def _fail(pending: _Pending, message: str, is_user_error: bool = True) -> None:
    if not pending.answer.done():
        pending.answer.set_result(Answer(message, is_user_error))
