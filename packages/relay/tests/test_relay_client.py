"""Artifacts over HTTP: complete or absent, also with faulty relays."""

import asyncio
import random
import socket

import pytest
from msgspec.json import encode
from starlette.responses import Response, StreamingResponse
from tests.support.relays import publish_bytes, running_relay

from prime_rl.storage.paths import RunPaths
from prime_rl.storage.relay.relay_client import ArtifactGone, RelayClient, RelayError, RelayUnreachable
from prime_rl.storage.relay.run_files import ArtifactName, FileDigest, RunFiles, hash_text

NAME = ArtifactName("weights", 1)
FILE = "weights/step_1/model.safetensors"
CONTENT = random.Random(0).randbytes(3 << 20)
CLOSED = "http://127.0.0.1:1"


def read_all(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(autouse=True)
def every_relay_is_waited_for(monkeypatch):
    """Otherwise a relay is left out whose listing comes half a second after that of another one."""
    monkeypatch.setattr("prime_rl.storage.relay.relay_client._OTHERS_SECONDS", 60.0)


@pytest.fixture
def source(tmp_path):
    publish_bytes(tmp_path / "source", 1, CONTENT)
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "copy/weights/step_1"


def assert_copied(target, source):
    assert read_all(target) == read_all(source / "weights/step_1")


def partial_file(target):
    (folder,) = target.parent.glob(".relay-step_1-*")
    return folder / "model.safetensors"


async def test_fetch_replaces_a_copy_by_all_files_byte_by_byte(source, target, tmp_path):
    publish_bytes(tmp_path / "copy", 1, b"of an abandoned branch")
    async with running_relay(source) as relay, RelayClient([relay.url], None) as client:
        index = await client.index()
        await client.fetch(NAME, target, index.artifacts[str(NAME)])
    assert_copied(target, source)
    assert [entry.name for entry in target.parent.iterdir()] == ["step_1"]
    assert RunFiles(RunPaths(target.parents[1])).index().artifacts == index.artifacts


async def test_fetch_after_a_lost_connection_continues_at_the_same_relay(source, target):
    async with running_relay(source) as one, running_relay(source) as other:
        sent, is_cut = 0, False

        def cut_once(block):
            nonlocal sent, is_cut
            sent += len(block)
            if is_cut or sent < len(CONTENT) // 2:
                return block
            is_cut = True
            return None

        one.alter = other.alter = cut_once
        async with RelayClient([one.url, other.url], None) as client:
            await client.fetch(NAME, target)
        assert_copied(target, source)
        assert sorted(map(len, (one.ranges(FILE), other.ranges(FILE)))) == [0, 2]
        (given,) = [value for value in one.ranges(FILE) + other.ranges(FILE) if value]
        assert given.startswith("bytes=") and int(given[6:-1]) > 0


async def test_connection_that_is_cut_each_time_after_some_bytes_completes(source, target):
    """As by a proxy with a time limit, or on a bad line."""
    seen = 0

    def cut(block):
        nonlocal seen
        if len(block) < 100:  # of the other file, which is fetched at the same time, or the end
            return block
        if seen == len(relay.ranges(FILE)):
            return None
        seen = len(relay.ranges(FILE))
        return block[:400_000]

    async with running_relay(source) as relay, RelayClient([relay.url], None) as client:
        relay.alter = cut
        await client.fetch(NAME, target)
        assert len(relay.ranges(FILE)) > 4
    assert_copied(target, source)


async def test_file_of_a_relay_that_ignores_ranges_begins_again(source, target):
    (target.parent / f".relay-step_1-{RunFiles(RunPaths(source)).manifest_digest(NAME)[:12]}").mkdir(parents=True)
    partial_file(target).write_bytes(CONTENT[:1000])
    async with running_relay(source) as relay, RelayClient([relay.url], None) as client:
        relay.ignores_range = True
        await client.fetch(NAME, target)
        assert relay.ranges(FILE) == ["bytes=1000-"]
    assert_copied(target, source)


async def test_aborted_fetch_is_resumed_by_another_process(source, target):
    class Abort(Exception):
        pass

    def abort(name, file, size):
        if target.parent.exists() and partial_file(target).exists() and partial_file(target).stat().st_size:
            raise Abort  # not at the end of the other file, which is fetched at the same time

    async with running_relay(source) as relay:
        async with RelayClient([relay.url], None) as client:
            with pytest.raises(Abort):
                await client.fetch(NAME, target, check=abort)
        assert not target.exists()
        begin = partial_file(target).stat().st_size
        assert 0 < begin < len(CONTENT)
        relay.requests.clear()
        async with RelayClient([relay.url], None) as client:
            await client.fetch(NAME, target)
        assert relay.ranges(FILE) == [f"bytes={begin}-"]
    assert_copied(target, source)


async def test_altered_bytes_are_never_committed(source, target):
    async with running_relay(source) as relay, RelayClient([relay.url], None) as client:
        relay.alter = lambda block: block.replace(CONTENT[100:110], bytes(10))
        with pytest.raises(RelayError, match="has another hash than announced"):
            await client.fetch(NAME, target)
        assert not target.exists()
        relay.alter = lambda block: block
        await client.fetch(NAME, target)
    assert_copied(target, source)


ALTERED, BREAKS_OFF, CUT, LONGER, SHORTER, OTHER_RANGE, SLOW, ERROR = KINDS = range(8)


def damaged_file(kind, relay):
    """Answer requests of the large file in a wrong way."""

    async def blocks():
        yield bytes(1 << 20)
        while kind == SLOW:
            yield b"x"
            await asyncio.sleep(0.05)
        if kind in (BREAKS_OFF, CUT):
            raise ConnectionAbortedError

    def respond(path, given):
        if path != f"/files/{FILE}":
            return None
        begin = int(given[6:-1]) if given else 0
        if kind == ERROR:
            return Response(b"", 500)
        if kind == ALTERED:
            return Response(bytes(len(CONTENT))[begin:])
        status, headers = 206 if begin else 200, {"content-range": f"bytes {begin}-/*"}
        if kind == LONGER:
            return StreamingResponse(iter([CONTENT[begin:], b"more"]), status, headers)
        if kind == SHORTER:
            return Response(CONTENT[: 2 << 20][begin:])
        if kind == OTHER_RANGE and begin:
            return Response(CONTENT[begin - 1 :], 206, {"content-range": f"bytes {begin - 1}-{len(CONTENT) - 1}/*"})
        if kind == CUT:
            return StreamingResponse(cut_after(CONTENT[begin : begin + 1000]), status, headers)
        return StreamingResponse(blocks())

    async def cut_after(data):
        await asyncio.sleep(0.1)
        yield data
        raise ConnectionAbortedError

    relay.respond = respond


@pytest.mark.parametrize("kind", KINDS)
async def test_one_damaged_relay_does_not_keep_a_good_one_from_being_used(kind, source, target):
    async with running_relay(source) as damaged, running_relay(source) as good:
        damaged_file(kind, damaged)
        urls = [damaged.url, good.url] if kind % 2 else [good.url, damaged.url]
        async with RelayClient(urls, None) as client:
            await client.fetch(NAME, target)
        assert len(damaged.ranges(FILE)) + len(good.ranges(FILE)) <= (4 if kind != CUT else 4000)
    assert_copied(target, source)


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("kind", [SHORTER, SLOW, BREAKS_OFF, ERROR])
async def test_fetch_from_damaged_relays_only_ends(kind, source, target):
    async with running_relay(source) as one, running_relay(source) as other:
        damaged_file(kind, one)
        damaged_file(kind, other)
        async with RelayClient([one.url, other.url], None) as client:
            with pytest.raises(RelayError, match=r"another hash|ended after|is slow: less than 1 MiB in 60 s"):
                await client.fetch(NAME, target)
            assert not target.exists()
            one.respond = lambda path, given: None  # it has been repaired
            await client.fetch(NAME, target)
    assert_copied(target, source)


async def test_relay_that_announces_another_hash_does_not_keep_a_good_one_from_being_used(source, target):
    """Its manifest is the right one, so that only the hashes of the files are wrong."""
    listing = RunFiles(RunPaths(source)).listing(NAME)
    for file in listing.files:
        listing.files[file] = FileDigest(listing.files[file].size, hash_text("other"))
    async with running_relay(source) as lying, running_relay(source) as good:
        lying.respond = lambda path, given: Response(encode(listing)) if path == f"/artifacts/{NAME}" else None
        for urls in ([lying.url, good.url], [good.url, lying.url]):
            async with RelayClient(urls, None) as client:
                await client.fetch(NAME, target)
            assert_copied(target, source)


async def test_two_relays_outvote_one_with_other_bytes(source, target, tmp_path):
    publish_bytes(tmp_path / "other", 1, bytes(len(CONTENT)))  # with the same manifest
    async with running_relay(tmp_path / "other") as one, running_relay(source) as two, running_relay(source) as three:
        async with RelayClient([one.url, two.url, three.url], None) as client:
            await client.fetch(NAME, target)
        assert not one.ranges(FILE)
    assert_copied(target, source)


async def test_relay_with_a_late_listing_is_asked_when_the_others_are_wrong(source, target, monkeypatch):
    monkeypatch.setattr("prime_rl.storage.relay.relay_client._OTHERS_SECONDS", 0.0)
    listing = encode(RunFiles(RunPaths(source)).listing(NAME))
    async with running_relay(source) as damaged, running_relay(source) as good:
        damaged_file(BREAKS_OFF, damaged)

        async def late():
            while not damaged.ranges(FILE):
                await asyncio.sleep(0.01)
            yield listing

        good.respond = lambda path, given: StreamingResponse(late()) if path == f"/artifacts/{NAME}" else None
        async with RelayClient([damaged.url, good.url], None) as client:
            await client.fetch(NAME, target)
    assert_copied(target, source)


@pytest.mark.extended
@pytest.mark.parametrize("path", ["/index", f"/artifacts/{NAME}"])
async def test_relay_that_sends_an_answer_byte_by_byte_is_left_out(path, source):
    async def drops():
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with running_relay(source) as dripping, running_relay(source) as good:
        dripping.respond = lambda found, given: StreamingResponse(drops()) if found == path else None
        async with RelayClient([dripping.url, good.url], None) as client:
            assert str(NAME) in (await client.index()).artifacts
            assert (await client.listing(NAME)).files
        async with RelayClient([dripping.url], None) as client:
            with pytest.raises(RelayUnreachable, match="timed out"):
                await (client.index() if path == "/index" else client.listing(NAME))


async def test_relay_that_is_not_there_or_hangs_is_left_out(source, target):
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel accepts connections
        for url in (CLOSED, f"http://127.0.0.1:{hanging.getsockname()[1]}"):
            async with running_relay(source) as relay, RelayClient([url, relay.url], None) as client:
                assert str(NAME) in (await client.index()).artifacts
                await client.fetch(NAME, target)
            assert_copied(target, source)


async def test_relay_that_refuses_or_is_malformed_is_left_out(source, target, said):
    async with running_relay(source, key="another") as refusing, running_relay(source) as broken:
        broken.index = b'{"artifacts": 1}'
        async with running_relay(source) as relay:
            async with RelayClient([refusing.url, broken.url, relay.url], "") as client:
                for _ in range(2):
                    assert str(NAME) in (await client.index()).artifacts
            assert sum("refuses the request" in line for line in said()) == 1
        async with RelayClient([relay.url, refusing.url], "") as client:
            with pytest.raises(RelayError, match="refuses the request"):  # not only that the other one does not answer
                await client.index()


async def test_error_distinguishes_absent_artifacts_absent_relays_and_wrong_keys(source, target):
    async with running_relay(source, key="right") as relay:
        async with RelayClient([relay.url], "right") as client:
            with pytest.raises(ArtifactGone, match="weights/step_2 is not there"):
                await client.fetch(ArtifactName("weights", 2), target)
        async with RelayClient([relay.url], "wrong") as client:
            with pytest.raises(RelayError, match="refuses the request: the API key is missing or wrong"):
                await client.index()
    async with RelayClient([CLOSED], None) as client:
        with pytest.raises(RelayUnreachable, match="does not answer"):
            await client.index()


async def test_cancelled_fetch_leaves_no_task(source, target):
    async with running_relay(source) as relay, RelayClient([relay.url], None) as client:
        reached = asyncio.Event()

        def wait_here(block):
            reached.set()
            return block[:1]

        relay.alter = wait_here
        fetching = asyncio.ensure_future(client.fetch(NAME, target))
        await reached.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if "work" in repr(task.get_coro())]
