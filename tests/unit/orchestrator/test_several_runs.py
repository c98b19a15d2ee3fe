"""A run of a trainer that several runs share: the announcement, waiting for a slot, and exclusion by the trainer."""

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from prime_rl.configs.loading.base_config import to_toml
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import WAIT_FOR_SLOT
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.liveness.run_settings import ADAPTER_RANK, MAX_RUNS
from prime_rl.orchestrator.resume import announce, find_start_point
from prime_rl.orchestrator.waits import (
    INFERENCE,
    TRAINER,
    ProgressWatchdog,
    end_tasks,
    raise_if_excluded,
    unless_excluded,
)
from prime_rl.storage.artifact import replace_file
from prime_rl.storage.checkpoint_artifacts import ResumeRecord, write_resume
from prime_rl.storage.paths import RunPaths
from tests.support.virtual_clock import virtual_clock


@pytest.fixture
def config(tmp_path):
    return OrchestratorConfig.load(["--output-dir", str(tmp_path / "run_a"), "--optim.lr", "1e-3"])


def trainer_of(paths, settings=None):
    """A stand-in for the trainer: its heartbeat in the run's folder, in this process."""
    settings = {ADAPTER_RANK: 8, MAX_RUNS: 2} if settings is None else settings
    return HeartbeatWriter(paths, "trainer_0", "trainer", interval_seconds=0.05, settings=settings)


def test_announce_replaces_the_configuration_after_an_earlier_refusal(config):
    paths = config.run_paths
    announce(config)
    before = paths.config("orchestrator").stat()
    replace_file(paths.refused, "rank")
    announce(config)
    after = paths.config("orchestrator").stat()
    assert not paths.refused.exists()
    assert (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns)
    assert paths.config("orchestrator").read_text() == to_toml(config)
    assert OrchestratorConfig.read(paths.config("orchestrator")) == config


@pytest.mark.parametrize(("folder", "is_written"), [("run_a", True), ("single", False)])
def test_announce_under_rl_writes_the_configuration_of_one_of_several_runs(tmp_path, monkeypatch, folder, is_written):
    """`rl` passes the file of a single run, also to a restarted process."""
    monkeypatch.setenv(SUPERVISED, "1")
    config = OrchestratorConfig.load(["--output-dir", str(tmp_path / folder)])
    announce(config)
    assert config.run_paths.config("orchestrator").exists() == is_written


@pytest.mark.parametrize(
    ("is_evicted", "message"),
    [
        (True, r"evicted\.txt: .*evicted this run: NaN three times; remove the file"),
        (False, "steps 3 to 3 of an earlier run"),
    ],
)
def test_announce_of_an_evicted_run_or_over_another_one_is_refused(config, is_evicted, message):
    paths = config.run_paths
    paths.weights(3).mkdir(parents=True)
    if is_evicted:
        paths.evicted.parent.mkdir(exist_ok=True)
        replace_file(paths.evicted, "NaN three times\n")
    with pytest.raises(ConfigError, match=message):
        announce(config)
    assert not paths.config("orchestrator").exists()


@pytest.mark.parametrize(("name", "error"), [("refused", ConfigError), ("evicted", RunError)])
async def test_unless_excluded_ends_the_work_within_a_second(config, name, error):
    announce(config)
    ended = []

    async def sample():
        try:
            replace_file(getattr(config.run_paths, name), "model.lora.rank = 32 is above 16\n")
            await asyncio.sleep(600)
        finally:
            ended.append(time.monotonic())

    begin = time.monotonic()
    with pytest.raises(error, match=r"^model\.lora\.rank = 32 is above 16$"):
        await unless_excluded(sample(), config.run_paths)
    assert ended and ended[0] - begin < 1


async def test_unless_excluded_passes_on_results_errors_and_cancellation(config):
    announce(config)
    started = asyncio.Event()

    async def fail():
        raise RunError("own error")

    async def sample():
        started.set()
        await asyncio.Event().wait()

    await unless_excluded(asyncio.sleep(0), config.run_paths)
    with pytest.raises(RunError, match="own error"):
        await unless_excluded(fail(), config.run_paths)
    task = asyncio.ensure_future(unless_excluded(sample(), config.run_paths))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("hanging", ["read_text", "mkdir"])
async def test_unless_excluded_ends_with_its_work_on_a_file_system_that_hangs(config, monkeypatch, hanging):
    announce(config)
    hung, released = threading.Event(), threading.Event()

    def hang(*_, **__):
        hung.set()
        released.wait()

    monkeypatch.setattr(Path, hanging, hang)
    try:
        async with asyncio.timeout(20):
            await unless_excluded(asyncio.to_thread(hung.wait), config.run_paths)
    finally:
        released.set()


def test_raise_if_excluded_removed_folder_ends_the_run_of_several(config, tmp_path):
    raise_if_excluded(RunPaths(tmp_path / "single"))
    announce(config)
    raise_if_excluded(config.run_paths)
    config.run_paths.config("orchestrator").unlink()
    with pytest.raises(RunError, match="was removed"):
        raise_if_excluded(config.run_paths)


@pytest.mark.parametrize("name", ["read_text", "stat"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_raise_if_excluded_ignores_a_file_system_that_fails(config, monkeypatch, name, number):
    announce(config)

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, name, fail)
    raise_if_excluded(config.run_paths)


def make_peer(paths, role=TRAINER, raises=True, settings=None):
    return PeerMonitor(paths, role, HeartbeatLimits(5, 60), raises, settings=settings or {}, clock=time.monotonic)


def test_peer_monitor_logs_each_place_in_the_queue_once(config, said):
    with trainer_of(config.run_paths) as trainer:
        peer = make_peer(config.run_paths)
        places = [f"{count} runs use this trainer, position {count - 1}" for count in (3, 2)]
        for place in places:
            trainer.enter(f"{WAIT_FOR_SLOT}: {place}")
            trainer._write()
            for _ in range(3):
                peer._last_poll = float("-inf")
                assert peer.check()
        trainer.enter("wait for batch 0")
        trainer._write()
        peer._last_poll = float("-inf")
        assert not peer.check() and peer.queue == ""
    assert said() == [f"this run waits for a slot of the trainer: {place}" for place in places]


def test_peer_monitor_of_an_orchestrator_that_waits_for_a_slot_has_no_queue(config):
    """Its phase lasts until the trainer, which waits for it, has given the slot."""
    with HeartbeatWriter(config.run_paths, "orchestrator", "orchestrator") as orchestrator:
        orchestrator.enter(WAIT_FOR_SLOT)
        orchestrator._write()
        peer = make_peer(config.run_paths, "orchestrator")
        assert not peer.check() and peer.queue == ""


@pytest.mark.parametrize("raises", [True, False])
@virtual_clock
async def test_watchdog_waiting_for_a_slot_is_no_timeout(config, raises):
    paths = config.run_paths

    async def beat():
        while True:
            trainer._write()
            await asyncio.sleep(0.2)

    with HeartbeatWriter(paths, "trainer_0", "trainer", interval_seconds=1000) as trainer:
        trainer.enter(f"{WAIT_FOR_SLOT}: 2 runs use this trainer, position 1")
        beating = asyncio.ensure_future(beat())
        heartbeat = HeartbeatWriter(paths, "orchestrator", "orchestrator")
        peers = {role: make_peer(paths, raises=raises) for role in (TRAINER, INFERENCE)}
        watchdog, wake = ProgressWatchdog(heartbeat, peers, timeout_seconds=1.5), asyncio.Event()
        with pytest.raises(TimeoutError):  # the slot of the server is taken after that of the trainer
            async with asyncio.timeout(4):
                await watchdog.wait_for_slot()
        asyncio.get_running_loop().call_later(4, wake.set)
        progress = heartbeat._progress
        await watchdog.wait(wake, 0, "wait for version 1", TRAINER, "version 1")
        assert heartbeat._progress > progress + 1, "`rl` would take it for stuck"
        trainer.enter("wait for batch 0")
        await watchdog.wait_for_slot()
        wake.clear()
        with pytest.raises(RunError, match="nothing happened for 2 s"):
            await watchdog.wait(wake, 0, "wait for version 1", TRAINER, "version 1")
        await end_tasks(beating)


def test_find_start_point_resumes_after_a_wait_for_a_slot_beyond_the_timeout(config):
    """The trainer records the resume when it gives the slot."""
    keys = ["--ckpt.resume-step", "-1", "--wait-timeout-seconds", "0.4", "--output-dir", str(config.output_dir)]
    config = OrchestratorConfig.load(keys)
    announce(config)
    give_slot = time.monotonic() + 0.8

    def check():
        if time.monotonic() > give_slot:
            write_resume(config.run_paths.checkpoints_dir, ResumeRecord(step=0, branch=1))
        return time.monotonic() < give_slot

    assert find_start_point(config, check).branch == 1


@pytest.mark.parametrize(("runs", "fits"), [(None, False), (1, False), (2, True)])
def test_peer_monitor_keys_of_a_run_need_a_trainer_of_several_runs(config, runs, fits):
    settings = {ADAPTER_RANK: 8} | ({} if runs is None else {MAX_RUNS: runs})
    with trainer_of(config.run_paths, settings):
        peer = make_peer(config.run_paths, settings=config.run_settings)
        if fits:
            peer.check()
            return
        with pytest.raises(ConfigError, match=rf"optim\.lr here: .* the one at trainer_0 \(pid {os.getpid()}"):
            peer.check()
