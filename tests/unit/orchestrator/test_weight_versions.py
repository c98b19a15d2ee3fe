"""Invalid published versions."""

import asyncio
import shutil
import threading

import pytest

from prime_rl.orchestrator.inference.weight_versions import InvalidWeights, WeightVersions
from prime_rl.storage.paths import RunPaths, steps_in
from tests.support.fake_engine import publish_version

REFUSED = InvalidWeights("another hash")


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


async def test_refuse_available_version_ends_the_run_or_is_skipped(paths):
    publish_version(paths, 1)
    with pytest.raises(InvalidWeights):
        await WeightVersions(paths, "fail").refuse(1, REFUSED)
    published = WeightVersions(paths, "keep_previous")
    assert await published.refuse(1, REFUSED) and published.newest is None


async def test_refuse_version_in_memory_counts_unless_a_newer_one_replaced_it(paths):
    """The trainer drops only replaced versions."""
    published, gone = WeightVersions(paths, "fail"), InvalidWeights("no longer in memory")
    publish_version(paths, 1, transfer={"type": "nccl"})
    with pytest.raises(InvalidWeights, match="no longer"):
        await published.refuse(1, gone)
    publish_version(paths, 2)
    assert not await published.refuse(1, gone)
    publish_version(paths, 3)
    with pytest.raises(InvalidWeights, match="another hash"):
        await published.refuse(2, REFUSED)


@pytest.mark.parametrize("on_refused", ["fail", "keep_previous"])
async def test_refuse_archived_version_does_not_end_the_run(paths, on_refused):
    """The version disappears during a read: the server then misses its files."""
    publish_version(paths, 1)
    publish_version(paths, 2)
    published = WeightVersions(paths, on_refused)
    await published.refresh()
    shutil.move(paths.weights(2), paths.root / "aside")
    assert not await published.refuse(2, REFUSED)
    assert published.newest == 1 and not published.refused


async def test_refresh_hanging_directory_does_not_block_the_event_loop(paths, monkeypatch):
    """The first refresh hangs, as on a network file system without its server; a later one must not overtake it."""
    loop, hang, started = asyncio.get_running_loop(), threading.Event(), asyncio.Event()

    def listing(directory):
        found = steps_in(directory)
        loop.call_soon_threadsafe(started.set)
        assert hang.wait(20)
        return found

    monkeypatch.setattr("prime_rl.orchestrator.inference.weight_versions.steps_in", listing)
    published = WeightVersions(paths, "keep_previous")
    first = asyncio.create_task(published.refresh())
    async with asyncio.timeout(20):
        await started.wait()
        publish_version(paths, 1)
        second = asyncio.create_task(published.refresh())
        await asyncio.sleep(0)
        assert not first.done() and not second.done() and published.steps == []
        hang.set()
        await asyncio.gather(first, second)
    assert published.steps == [1]
