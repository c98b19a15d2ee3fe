"""Results are set in order, a limited number in each turn of the event loop."""

import asyncio

from prime_rl.rollouts.clients.generation_stream import LoopTurns


async def test_resolve_sets_a_limited_number_of_results_per_turn() -> None:
    loop, turns = asyncio.get_running_loop(), LoopTurns(2)
    futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(5)]
    for number, future in enumerate(futures):
        turns.resolve(future, number)
    done = []
    for _ in range(4):
        done.append(sum(future.done() for future in futures))
        await asyncio.sleep(0)
    assert done == [0, 2, 4, 5]
    assert [future.result() for future in futures] == [0, 1, 2, 3, 4]


async def test_resolve_skips_a_cancelled_future_and_continues_later() -> None:
    loop, turns = asyncio.get_running_loop(), LoopTurns(1)
    for _ in range(2):  # the second time after the queue was empty
        cancelled, other = loop.create_future(), loop.create_future()
        turns.resolve(cancelled, 1)
        turns.resolve(other, 2)
        cancelled.cancel()
        assert await other == 2
