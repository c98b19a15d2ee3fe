"""A shared directory whose other machine sees changes seconds later, as with NFS: names, absences and sizes are cached.

The other machine's mount is bindfs, whose caching the kernel does with these times.
"""

import asyncio
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import HeartbeatMonitor, ProcessState
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.artifact import is_local, retry_until_complete, visibility_timeout
from prime_rl.storage.batch import read_batch, write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import branch_of_batch
from prime_rl.storage.wait_for import wait_for, wait_until
from tests.support.fake_engine import fake_engine, publish_version
from tests.unit.orchestrator.test_inference_pool import policy_of
from tests.unit.storage.test_batch import make_batch

LAG_SECONDS = 1.0
FIELDS = {"branch": 0, "async_level": 2}


@contextmanager
def mounted(source, target, lag_seconds):
    """Mount `source` at `target`; changes below `source` appear there up to `lag_seconds` seconds later."""
    target.mkdir()
    options = ",".join(f"{name}_timeout={lag_seconds}" for name in ("attr", "entry", "negative"))
    done = subprocess.run(["bindfs", "-o", options, source, target], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"bindfs cannot mount here: {done.stderr.strip()[:200]}")
    try:
        yield target
    finally:
        subprocess.run(["fusermount3", "-u", "-z", target], check=True)


pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(shutil.which("bindfs") is None, reason="bindfs not installed (Debian: bindfs)"),
]


@pytest.fixture
def machines(tmp_path):
    """The run directory as its writer and as its reader sees it."""
    (tmp_path / "here").mkdir()
    with mounted(tmp_path / "here", tmp_path / "there", LAG_SECONDS) as there:
        yield RunPaths(tmp_path / "here"), RunPaths(there)


def test_batch_is_read_complete_whenever_its_files_become_visible(machines):
    here, there = machines
    here.rollouts_dir.mkdir()
    for step in range(3):
        assert not there.rollouts(step).exists()  # the next look finds this in the cache
        assert not is_local(there.root) and visibility_timeout(there.rollouts(step)) == 60
        shipping = threading.Thread(
            target=write_batch, args=(here.rollouts(step), make_batch(), {**FIELDS, "step": step})
        )
        shipping.start()
        wait_for(there.rollouts(step), 120, "the orchestrator")
        read = partial(read_batch, there.rollouts(step), step)
        batch, manifest = retry_until_complete(read, visibility_timeout(there.rollouts(step)))
        assert (manifest["step"], len(batch.tokens)) == (step, 9)
        shipping.join()


def test_batch_of_the_new_branch_is_waited_for(machines):
    here, there = machines
    write_batch(here.rollouts(0), make_batch(), {**FIELDS, "step": 0})
    assert branch_of_batch(there.rollouts(0)) == 0
    here.rollouts(0).rename(here.root / "archived")
    write_batch(here.rollouts(0), make_batch(((5,),)), {**FIELDS, "step": 0, "branch": 1})
    wait_until(there.rollouts_dir, lambda: branch_of_batch(there.rollouts(0)) == 1, 120, "the batch of branch 1")
    read = partial(read_batch, there.rollouts(0), 0)
    batch, _ = retry_until_complete(read, visibility_timeout(there.rollouts(0)))
    assert len(batch.tokens) == 5


def test_heartbeat_that_arrives_late_is_alive(tmp_path):
    """NFS caches the attributes of a file for at least three seconds (acregmin)."""
    (tmp_path / "here").mkdir()
    with mounted(tmp_path / "here", tmp_path / "there", 3.0) as there:
        monitor = HeartbeatMonitor(RunPaths(there), HeartbeatLimits(warn_after_seconds=10), ("trainer",))
        states, seen = set(), False
        with HeartbeatWriter(RunPaths(tmp_path / "here"), "trainer_0", "trainer"):
            begin = time.monotonic()
            while not seen or time.monotonic() < begin + 6:
                assert time.monotonic() < begin + 120, "no heartbeat has arrived"
                for report in monitor.poll():
                    states.add(report.state)
                    seen = seen or report.seen_alive
                threading.Event().wait(0.2)  # the interval of an observer
        assert states == {ProcessState.ALIVE}
        assert seen


async def test_versions_reach_the_servers_and_old_ones_are_deleted(machines):
    """The orchestrator looks through the lagging mount; the trainer publishes on the other side."""
    here, there = machines
    async with fake_engine() as engine, policy_of(there, [engine]) as (policy, changes):
        for step in (1, 2, 3):
            publish_version(here, step)
            await changes.until(lambda step=step: policy.version == step)
            assert engine.hash == f"h{step}"
        async with asyncio.timeout(120):
            while here.weights(2).exists():
                await asyncio.sleep(0.05)
        assert here.weights(3).exists()
