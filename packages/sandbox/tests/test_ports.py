"""Servers of the host that programs of a session may reach."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from prime_rl_sandbox.execution import SandboxError, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")

_FETCH = """
import socket
def fetch(port, data):
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        parts = bytearray()
        while part := connection.recv(65536):
            parts += part
    return bytes(parts)
"""


@asynccontextmanager
async def server(handle):
    async def answer(reader, writer):
        try:
            await handle(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as running:
        yield running.sockets[0].getsockname()[1]


@asynccontextmanager
async def forwarding(sandbox, handle, code=_FETCH):
    """A session that has run `code`, in which PORT is the port of a server that it reaches; and this port."""
    async with server(handle) as port, sandbox.session() as session:
        await session.forward([port])
        assert (await session.run(f"PORT = {port}\n{code}")).ok
        yield session, port


async def reverse(reader, writer):
    writer.write((await reader.read())[::-1])
    await writer.drain()


async def test_programs_reach_the_ports_that_are_forwarded_and_no_others(sandbox):
    async with server(reverse) as port, server(reverse) as other, sandbox.session() as session:
        assert (await session.run(_FETCH)).ok
        assert "Error" in (await session.run(f"fetch({port}, b'abc')")).stderr
        await session.forward([port])
        assert (await session.run(f"fetch({port}, b'abc')")).value == "b'cba'"
        assert "ConnectionRefusedError" in (await session.run(f"fetch({other}, b'abc')")).stderr
        await session.forward([port, other])
        assert (await session.run(f"fetch({other}, b'xyz')")).value == "b'zyx'"
    async with sandbox.session() as session:  # another session has none of them
        assert "Error" in (await session.run(_FETCH + f"fetch({port}, b'abc')")).stderr


async def test_large_data_passes_in_both_directions_over_many_connections_at_once(sandbox):
    program = """
from concurrent.futures import ThreadPoolExecutor
texts = [bytes([number]) * (number * 150_000 + 1) + b"end" for number in range(10)]
with ThreadPoolExecutor(10) as pool:
    answers = [*pool.map(lambda text: fetch(PORT, text), texts)]
[answer == text[::-1] for answer, text in zip(answers, texts)]
"""
    async with forwarding(sandbox, reverse) as (session, _):
        result = await session.run(program, timeout=60)
        assert result.value == repr([True] * 10), result.stderr


async def test_answers_arrive_while_the_program_still_sends(sandbox):
    async def echo(reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()

    program = """
with socket.create_connection(("127.0.0.1", PORT), 10) as connection:
    file = connection.makefile("rw")
    lines = []
    for number in range(5):
        file.write(f"line {number}\\n"); file.flush()
        lines.append(file.readline())
lines
"""
    async with forwarding(sandbox, echo) as (session, _):
        result = await session.run(program, timeout=20)
        assert result.value == repr([f"LINE {number}\n" for number in range(5)])


async def test_a_connection_waits_between_cells_and_continues_in_the_next(sandbox):
    program = f"""{_FETCH}
import threading
got, start = [], threading.Event()
def work():
    start.wait()
    got.append(fetch(PORT, b"later"))
thread = threading.Thread(target=work, daemon=True)
thread.start()
"""
    async with forwarding(sandbox, reverse, program) as (session, _):
        assert (await session.run("start.set()")).ok
        assert (await session.run("thread.join(); got", timeout=20)).value == "[b'retal']"


async def test_a_server_that_ends_a_connection_or_is_gone_is_an_error_of_the_program(sandbox):
    async def abort(reader, writer):
        await reader.read(1)
        writer.transport.abort()

    async with forwarding(sandbox, abort) as (session, port):
        result = await session.run("fetch(PORT, b'x' * 1_000_000)", timeout=20)
        assert result.verdict is Verdict.ERROR or result.value == "b''"
    async with sandbox.session() as session:
        await session.forward([port])
        result = await session.run(_FETCH + f"fetch({port}, b'abc')", timeout=20)
        assert "Error" in result.stderr or result.value == "b''"
        assert (await session.run("1 + 1")).value == "2"


async def test_a_program_that_floods_a_server_which_does_not_read_ends_with_its_cell(sandbox):
    ended, closed = asyncio.Event(), asyncio.Event()

    async def wait(reader, writer):
        await reader.read(10)
        await ended.wait()
        with suppress(ConnectionError):
            while await reader.read(2**20):
                continue
        closed.set()

    flood = """
with socket.create_connection(("127.0.0.1", PORT), 10) as connection:
    connection.settimeout(0.5)
    count = 0
    try:
        while True:
            count += connection.send(bytes(100_000))
    except TimeoutError:
        pass
count < 20_000_000
"""
    async with server(wait) as port:
        async with sandbox.session() as session:
            await session.forward([port])
            result = await session.run(_FETCH + flood.replace("PORT", str(port)), timeout=20)
            assert result.value == "True", result.stderr
        ended.set()
        await asyncio.wait_for(closed.wait(), 10)


async def test_a_port_that_a_program_has_taken_cannot_be_forwarded(sandbox):
    async with sandbox.session() as session:
        await session.forward([9000])
        taken = await session.run("import socket; server = socket.create_server(('127.0.0.1', 9001))")
        assert taken.ok
        with pytest.raises(SandboxError, match=r"cannot forward ports: .*in use"):
            await session.forward([9001])
        assert (await session.run("2 + 2")).value == "4"
