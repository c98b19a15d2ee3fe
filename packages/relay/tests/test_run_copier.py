"""Two machines without a shared directory: what one process writes appears at the other, and deletions come back."""

import asyncio
import itertools
import json
import shutil

import pytest
from starlette.responses import Response
from tests.support.relays import copying, publish_bytes, running_relay, save_part, ship_bytes

from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.storage.artifact import remove_artifact
from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.checkpoint_artifacts import (
    COMMITTED,
    ResumeRecord,
    StopRecord,
    read_stop,
    write_resume,
    write_stop,
)
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.relay.relay_client import RelayClient
from prime_rl.storage.relay.run_files import RelayIndex, RunFiles
from prime_rl.storage.rollback import roll_back
from prime_rl_relay.run_copier import RunCopier

pytestmark = pytest.mark.extended


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def hosts(tmp_path):
    """The directories of trainer and orchestrator, each with a relay that copies from the other."""
    trainer, orchestrator = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "orchestrator")
    async with (
        running_relay(trainer.root) as a,
        running_relay(orchestrator.root) as b,
        copying(orchestrator.root, [a.url], "trainer"),
        copying(trainer.root, [b.url], "orchestrator"),
    ):
        yield trainer, orchestrator


async def test_batches_and_versions_are_copied_and_deletions_of_their_readers_come_back(hosts):
    trainer, orchestrator = hosts
    for step in range(3):
        ship_bytes(orchestrator.root, step)
        save_part(orchestrator.root, step + 1)
        await until(trainer.rollouts(step).exists)
        assert (trainer.rollouts(step) / ROWS_FILE).read_bytes() == b"rows of 0.%d" % step
        publish_bytes(trainer.root, step + 1, b"v%d" % (step + 1))
        await until(orchestrator.weights(step + 1).exists)
        assert (orchestrator.weights(step + 1) / "model.safetensors").read_bytes() == b"v%d" % (step + 1)
    remove_artifact(orchestrator.weights(1))
    (trainer.rollouts(0) / ROWS_FILE).unlink()
    shutil.rmtree(trainer.checkpoint(1))
    (trainer.checkpoint(3) / COMMITTED).write_text("{}")
    await until(lambda: not trainer.weights(1).exists())
    await until(lambda: not (orchestrator.rollouts(0) / ROWS_FILE).exists())
    await until(lambda: not orchestrator.checkpoint(1).exists())
    assert (orchestrator.rollouts(0) / "manifest.json").exists()
    assert steps_in(trainer.weights_dir) == steps_in(orchestrator.weights_dir) == [2, 3]
    assert (orchestrator.rollouts(1) / ROWS_FILE).exists() and (trainer.rollouts(1) / ROWS_FILE).exists()
    assert steps_in(orchestrator.checkpoints_dir) == [2, 3]


async def test_trainer_that_stops_gets_the_part_of_its_checkpoint(hosts):
    """Also if it has that of a later one, which is due."""
    trainer, orchestrator = hosts
    save_part(orchestrator.root, 20)
    await until((trainer.checkpoint(20) / "orchestrator").exists)
    write_stop(trainer.checkpoints_dir, StopRecord(18, 0))
    await until(lambda: read_stop(orchestrator.checkpoints_dir) == StopRecord(18, 0))
    save_part(orchestrator.root, 18)
    await until((trainer.checkpoint(18) / "orchestrator").exists)


def test_part_is_deleted_when_the_trainer_has_committed_a_newer_one_only(tmp_path):
    for step in (18, 20):
        save_part(tmp_path, step)
    files = RunFiles(RunPaths(tmp_path))
    newer = {"checkpoints/step_20/orchestrator": files.index().artifacts["checkpoints/step_20/orchestrator"]}
    copier = RunCopier(files, RelayClient([], None), "trainer", poll_seconds=1)
    copier.apply(RelayIndex(newer, {}))
    assert RunPaths(tmp_path).checkpoint(18).exists()
    copier.apply(RelayIndex(newer, {"checkpoints/step_20/COMMITTED": "{}"}))
    assert not RunPaths(tmp_path).checkpoint(18).exists()


async def test_batch_arrives_after_the_part_of_its_checkpoint(tmp_path):
    """The trainer commits a checkpoint without the part if it reads the batch and finds none."""
    seen = []
    save_part(tmp_path / "orchestrator", 4)
    ship_bytes(tmp_path / "orchestrator", 3)
    trainer = RunPaths(tmp_path / "trainer")
    async with running_relay(tmp_path / "orchestrator") as relay:

        def look(block):
            seen.append((trainer.checkpoint(4) / "orchestrator").exists())
            return block

        relay.alter = look
        async with copying(trainer.root, [relay.url], "orchestrator"):
            await until(trainer.rollouts(3).exists)
    assert seen == [False, True]


async def test_settings_of_processes_on_two_machines_are_compared(hosts):
    """Each sees the other's in the copy of its heartbeat."""
    trainer, orchestrator = hosts
    limits, names = HeartbeatLimits(), {"trainer": "trainer_0", "orchestrator": "orchestrator"}
    steps = {"trainer": {"max_steps": 4}, "orchestrator": {"max_steps": 8}}
    with (
        HeartbeatWriter(trainer, "trainer_0", "trainer", settings=steps["trainer"]),
        HeartbeatWriter(orchestrator, "orchestrator", "orchestrator", settings=steps["orchestrator"]),
    ):
        for own, paths, other in (("trainer", trainer, "orchestrator"), ("orchestrator", orchestrator, "trainer")):
            await until(paths.heartbeat(names[other]).exists)
            monitor = PeerMonitor(paths, other, limits, raises=True, settings=steps[own])
            with pytest.raises(ConfigError, match=rf"max_steps = \d here and \d at {names[other]} "):
                monitor.check()


async def test_heartbeats_arrive_while_a_version_is_copied(tmp_path):
    trainer, copy = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "copy")
    publish_bytes(trainer.root, 1, bytes(3 << 20))
    trainer.heartbeats_dir.mkdir()
    async with running_relay(trainer.root) as relay:
        started = asyncio.Event()

        def stall(block):
            started.set()
            return b""

        relay.alter = stall
        async with copying(copy.root, [relay.url], "trainer"):
            await started.wait()
            for beat in "12":
                trainer.heartbeat("trainer_0").write_text(beat)
                await until(lambda beat=beat: copy.heartbeat("trainer_0").exists()
                            and copy.heartbeat("trainer_0").read_text() == beat)  # fmt: skip
            assert not copy.weights(1).exists()
            relay.alter = lambda block: block
            await until(copy.weights(1).exists)


async def test_rollback_removes_abandoned_versions_before_its_record_appears(hosts):
    trainer, orchestrator = hosts
    for step in (1, 2, 3):
        publish_bytes(trainer.root, step)
        await until(orchestrator.weights(step).exists)
    roll_back(trainer, trainer.checkpoints_dir, step=2, branch=1, weights=True, rollouts=True)
    await until((orchestrator.checkpoints_dir / "RESUME.json").exists)
    assert steps_in(orchestrator.weights_dir) == [1]
    publish_bytes(trainer.root, 2, b"again", branch=1)
    await until(orchestrator.weights(2).exists)
    assert json.loads((orchestrator.weights(2) / "manifest.json").read_text())["branch"] == 1


async def test_batch_of_an_abandoned_branch_is_not_copied(tmp_path):
    trainer, orchestrator = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "orchestrator")
    trainer.checkpoints_dir.mkdir(parents=True)
    write_resume(trainer.checkpoints_dir, ResumeRecord(step=2, branch=1))
    for step in range(4):
        ship_bytes(orchestrator.root, step)
    async with running_relay(orchestrator.root) as relay, copying(trainer.root, [relay.url], "orchestrator"):
        await until(trainer.rollouts(1).exists)
        shutil.rmtree(orchestrator.rollouts(2))
        ship_bytes(orchestrator.root, 2, branch=1)
        ship_bytes(orchestrator.root, 4, branch=1)
        await until(trainer.rollouts(4).exists)
        assert (trainer.rollouts(2) / ROWS_FILE).read_bytes() == b"rows of 1.2"
        assert not trainer.rollouts(3).exists()


@pytest.mark.parametrize("writer", ["has it", "has archived it", "has replaced it"])
def test_what_the_reader_has_of_an_abandoned_branch_deletes_nothing(tmp_path, writer):
    """The reader's index is from before it archived batch 2."""
    ship_bytes(tmp_path, 0, branch=1)
    abandoned = ship_bytes(tmp_path, 2)
    files = RunFiles(RunPaths(tmp_path))
    index = RelayIndex({"rollouts/step_2": files.index().artifacts["rollouts/step_2"]}, {})
    if writer != "has it":
        abandoned.rename(tmp_path / "archived")
    if writer == "has replaced it":
        ship_bytes(tmp_path, 2, branch=1)
    copier = RunCopier(files, RelayClient([], None), "trainer", poll_seconds=1)
    copier.apply(index)
    assert (RunPaths(tmp_path).rollouts(0) / ROWS_FILE).exists()
    ship_bytes(tmp_path, 3, branch=1)
    copier.apply(RelayIndex({"rollouts/step_3": files.index().artifacts["rollouts/step_3"]}, {}))
    assert not (RunPaths(tmp_path).rollouts(0) / ROWS_FILE).exists()


async def test_copy_of_an_abandoned_batch_is_replaced(hosts):
    trainer, orchestrator = hosts
    ship_bytes(orchestrator.root, 0)
    await until(trainer.rollouts(0).exists)
    shutil.rmtree(orchestrator.rollouts(0))
    ship_bytes(orchestrator.root, 0, branch=1)
    await until(lambda: (trainer.rollouts(0) / ROWS_FILE).read_bytes() == b"rows of 1.0"
                if (trainer.rollouts(0) / ROWS_FILE).exists() else False)  # fmt: skip


async def test_committed_part_is_never_replaced(hosts):
    trainer, orchestrator = hosts
    save_part(orchestrator.root, 4)
    part = trainer.checkpoint(4) / "orchestrator/state.json"
    await until(part.exists)
    (trainer.checkpoint(4) / COMMITTED).write_text("{}")
    await until((orchestrator.checkpoint(4) / COMMITTED).exists)
    shutil.rmtree(orchestrator.checkpoint(4) / "orchestrator")
    save_part(orchestrator.root, 4, branch=1)
    ship_bytes(orchestrator.root, 4)
    await until(trainer.rollouts(4).exists)
    assert part.read_text() == '"0.4"'


async def test_relay_that_has_lost_its_files_deletes_none(hosts):
    trainer, orchestrator = hosts
    publish_bytes(trainer.root, 1)
    await until(orchestrator.weights(1).exists)
    shutil.rmtree(trainer.weights_dir)
    trainer.heartbeats_dir.mkdir()
    trainer.heartbeat("trainer_0").write_text("later")
    await until(orchestrator.heartbeat("trainer_0").exists)
    assert orchestrator.weights(1).exists()


async def test_mirror_serves_what_it_copies_and_survives_the_loss_of_one_source(tmp_path):
    """Versions pass two mirrors; the second one has two sources, of which one ends."""
    trainer, last = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "last")
    mirror = tmp_path / "mirror"
    async with (
        running_relay(trainer.root) as first,
        running_relay(mirror) as second,
        copying(mirror, [first.url], "trainer"),
    ):
        async with running_relay(mirror) as other, copying(last.root, [other.url, second.url], "trainer"):
            publish_bytes(trainer.root, 1)
            await until(last.weights(1).exists)
        async with copying(last.root, [other.url, second.url], "trainer"):
            publish_bytes(trainer.root, 2)
            await until(last.weights(2).exists)


async def test_mirror_that_is_cut_off_from_the_trainer_is_replaced(tmp_path, said, monkeypatch):
    """It still answers, with an index that does not change any more."""
    monkeypatch.setattr("prime_rl_relay.run_copier._WARN_SECONDS", 0.05)
    monkeypatch.setattr("prime_rl_relay.run_copier._PAUSE_SECONDS", 0.02)
    trainer, stale, copy = (RunPaths(tmp_path / name) for name in ("trainer", "stale", "copy"))
    for paths in (trainer, stale):
        publish_bytes(paths.root, 1)
        paths.heartbeats_dir.mkdir()
        paths.heartbeat("trainer_0").write_text("first")
    stale.heartbeat("orchestrator").write_text("first")
    async with (
        running_relay(stale.root) as mirror,
        running_relay(trainer.root) as relay,
        copying(copy.root, [mirror.url, relay.url], "trainer"),
    ):
        await until(copy.weights(1).exists)
        async with asyncio.timeout(120):
            for beat in itertools.count():
                trainer.heartbeat("trainer_0").write_text(f"beat {beat}")
                stale.heartbeat("orchestrator").write_text(f"beat {beat}")  # of another writer
                if beat == 20:
                    publish_bytes(trainer.root, 2)
                if copy.weights(2).exists():
                    break
                await asyncio.sleep(0.01)
        await until(lambda: copy.heartbeat("trainer_0").read_text() == f"beat {beat}")
        num_requests = len(mirror.requests)
        trainer.heartbeat("trainer_0").write_text("last")
        await until(lambda: copy.heartbeat("trainer_0").read_text() == "last")
        await until(lambda: len(mirror.requests) > num_requests + 2)
        assert copy.heartbeat("trainer_0").read_text() == "last", "an old index revives no process"
    assert sum(f"{mirror.url} has had nothing new" in line and relay.url in line for line in said()) == 1


async def test_mirror_from_before_a_rollback_changes_nothing_until_it_is_of_a_living_run(tmp_path):
    trainer, stale, copy = (RunPaths(tmp_path / name) for name in ("trainer", "stale", "copy"))
    for step in (1, 2, 3):
        publish_bytes(stale.root, step)
    publish_bytes(trainer.root, 1)
    roll_back(trainer, trainer.checkpoints_dir, step=1, branch=1, weights=False, rollouts=True)
    publish_bytes(trainer.root, 2, branch=1)
    async with running_relay(stale.root) as mirror:
        async with running_relay(trainer.root) as relay, copying(copy.root, [relay.url, mirror.url], "trainer"):
            await until(copy.weights(2).exists)
            relay.index = b"{}"
            mirror.requests.clear()
            await until(lambda: len(mirror.requests) > 4)
        async with copying(copy.root, [mirror.url], "trainer"):  # also after a restart of the relay
            mirror.requests.clear()
            await until(lambda: len(mirror.requests) > 4)
            assert json.loads((copy.weights(2) / "manifest.json").read_text())["branch"] == 1
            assert steps_in(copy.weights_dir) == [2]
            stale.heartbeats_dir.mkdir()
            stale.heartbeat("trainer_0").write_text("of a new run")
            await until(copy.weights(3).exists)


async def test_only_the_newest_version_and_its_bases_are_copied(tmp_path):
    trainer, copy = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "copy")
    for step in (1, 2, 3):
        publish_bytes(trainer.root, step)
    for step in (4, 5):
        link = {"base": f"step_{step - 1}", "branch": 0, "step": step - 1, "hash": f"0.{step - 1}"}
        publish_bytes(trainer.root, step, delta=link)
    async with running_relay(trainer.root) as relay, copying(copy.root, [relay.url], "trainer"):
        await until(copy.weights(5).exists)
        assert steps_in(copy.weights_dir) == [3, 4, 5]


async def test_silent_relay_is_reported_once_and_copying_continues(tmp_path, said, monkeypatch):
    monkeypatch.setattr("prime_rl_relay.run_copier._WARN_SECONDS", 0)
    trainer, copy = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "copy")
    publish_bytes(trainer.root, 1)
    async with running_relay(trainer.root) as relay:
        urls = ["http://127.0.0.1:1"]
        async with RelayClient(urls, None) as client:
            copier = RunCopier(RunFiles(copy), client, "trainer", poll_seconds=0.01)
            task = asyncio.create_task(copier.run())
            await until(lambda: any("no files of the trainer" in line for line in said()))
            client._urls = [relay.url]
            await until(copy.weights(1).exists)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert sum("no files of the trainer" in line and "127.0.0.1:1 does not answer" in line for line in said()) == 1
    assert any("the relay of the trainer answers again" in line for line in said())


@pytest.mark.parametrize("has_listing", [True, False])
async def test_index_of_a_damaged_relay_does_not_keep_a_good_one_from_being_used(has_listing, tmp_path):
    """Its index lists a version that it does not have, or has with wrong bytes."""
    trainer, damaged, copy = (RunPaths(tmp_path / name) for name in ("trainer", "damaged", "copy"))
    publish_bytes(trainer.root, 1)
    publish_bytes(damaged.root, 1, note="another manifest")
    async with running_relay(damaged.root) as first, running_relay(trainer.root) as second:
        first.alter = lambda block: bytes(len(block))
        if not has_listing:
            first.respond = lambda path, given: Response(status_code=404) if path.startswith("/artifacts") else None
        async with copying(copy.root, [first.url, second.url], "trainer"):
            await until(copy.weights(1).exists)
    assert (copy.weights(1) / "model.safetensors").read_bytes() == b"weights"
