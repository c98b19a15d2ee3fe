"""I7: the orchestrator's wait ends, however often its loop is woken for nothing."""

import asyncio
import os
import time

import pytest

from prime_rl.errors import RunError
from prime_rl.orchestrator.tasks import end_tasks
from prime_rl.orchestrator.vigil import INFERENCE, SUPERVISOR, TRAINER, Vigil, watch_supervisor
from prime_rl.run.heart import Heartbeat
from prime_rl.run.heartbeat import Limits
from prime_rl.run.paths import RunPaths
from prime_rl.run.peers import PeerLost, Peers


def make_vigil(tmp_path, timeout_s, judges=True, limit_s=60.0):
    paths = RunPaths(tmp_path)
    heart = Heartbeat(paths, "orchestrator", "orchestrator")
    limits = Limits(limit_s, limit_s)
    peers = {role: Peers(paths, role, limits, judges, role == INFERENCE) for role in (TRAINER, INFERENCE)}
    return heart, Vigil(heart, peers, timeout_s)


async def test_being_woken_for_nothing_does_not_put_the_deadline_off(tmp_path):
    heart, vigil = make_vigil(tmp_path, timeout_s=0.4)
    wake = asyncio.Event()

    async def wait(mark):
        async with asyncio.timeout(10):
            while True:
                wake.clear()
                asyncio.get_running_loop().call_later(0.02, wake.set)
                await vigil.wait(wake, mark, "sample batch 3", INFERENCE, "2 groups in flight")

    begin = time.monotonic()
    with pytest.raises(RunError, match=r"nothing happened for 0 s \(wait_timeout_seconds\); waiting for 2 groups"):
        await wait((3, 1, 0))
    assert 0.4 <= time.monotonic() - begin < 10
    assert heart._phase[:3] == ("sample batch 3", 0.4, "inference")
    progress = heart._progress
    with pytest.raises(RunError):
        await wait((3, 1, 1))
    assert heart._progress == progress + 1, "progress is what happened, not how often it was looked"


async def test_what_happens_starts_the_deadline_anew(tmp_path):
    _, vigil = make_vigil(tmp_path, timeout_s=0.4)
    wake = asyncio.Event()
    for mark in range(8):
        wake.clear()
        asyncio.get_running_loop().call_later(0.1, wake.set)
        await vigil.wait(wake, mark, "sample batch 3", INFERENCE, "groups")


async def test_a_server_that_fails_while_it_starts_is_not_waited_for_any_longer(tmp_path):
    heart, vigil = make_vigil(tmp_path, timeout_s=60, limit_s=0.2)
    its = Heartbeat(RunPaths(tmp_path), "inference_node_8000", "inference")
    its.start()
    its.close("failed")
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    with pytest.raises(PeerLost, match=r"inference_node_8000 .* has failed"):
        await vigil.start(work(), INFERENCE)
    assert ended.is_set()
    assert heart._phase[:3] == ("wait for inference", None, "inference")


async def test_what_waits_for_the_start_is_done_or_fails_by_itself(tmp_path):
    _, vigil = make_vigil(tmp_path, timeout_s=60)
    await vigil.start(asyncio.sleep(0), INFERENCE)

    async def fails():
        raise RunError("refused")

    with pytest.raises(RunError, match="refused"):
        await vigil.start(fails(), INFERENCE)


@pytest.mark.parametrize("role", [TRAINER, INFERENCE])
async def test_a_trainer_that_is_lost_ends_the_wait_for_it_and_no_other(tmp_path, role):
    _, vigil = make_vigil(tmp_path, timeout_s=1.5, limit_s=0.2)
    its = Heartbeat(RunPaths(tmp_path), "trainer_0", "trainer")
    its.start()
    its.close("failed")
    error, words = (
        (PeerLost, f"trainer_0 .pid {os.getpid()} on .* has failed") if role == TRAINER else (RunError, "inf")
    )
    with pytest.raises(error, match=words):
        await vigil.wait(asyncio.Event(), 0, "wait", role, "inf")


async def test_at_the_deadline_it_tells_what_it_knows_of_the_trainer(tmp_path):
    _, vigil = make_vigil(tmp_path, timeout_s=0.2, judges=False)
    with Heartbeat(RunPaths(tmp_path), "trainer_0", "trainer") as its:
        its.enter("step 3")
        with pytest.raises(RunError, match=r"version 4; trainer_0 \(pid .* is alive; phase"):
            await vigil.wait(asyncio.Event(), 0, "wait for version 4", TRAINER, "version 4")


async def test_the_supervisor_is_looked_after(tmp_path, said):
    paths = RunPaths(tmp_path)
    supervisor = Peers(paths, SUPERVISOR, Limits(0.5, 1), judges=False)
    with Heartbeat(paths, SUPERVISOR, SUPERVISOR, interval_s=1000):  # one beat, and then none
        watching = asyncio.create_task(watch_supervisor(supervisor))
        async with asyncio.timeout(30):
            while not any("has been silent" in line for line in said()):
                assert not watching.done()
                await asyncio.sleep(0.02)
    await end_tasks(watching)
