import asyncio
import time

from prime_rl.orchestrator.health.event_loop_lag import EventLoopLag


async def test_event_loop_lag_blocking_call_is_measured():
    lag, stop = EventLoopLag(), asyncio.Event()
    assert lag.metrics() == {}
    measuring = asyncio.create_task(lag.measure(stop))
    await asyncio.sleep(0)
    time.sleep(0.2)  # the fault under test: something blocks the loop
    stop.set()
    await measuring
    assert lag.metrics()["event_loop_lag/max"] > 0.1
    assert lag.metrics() == {}, "each measurement is told once"
