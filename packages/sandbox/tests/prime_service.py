"""A local service with the HTTP interface of remote sandboxes: machines are folders, and commands run on this machine.

The routes, bodies and streams are those of the client library `prime-sandboxes`: JSON to create, poll and delete a
machine, and the Connect protocol (each message of a stream has five bytes before it) for the processes in it.
"""

import asyncio
import contextlib
import struct
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

from aiohttp import web
from prime_sandboxes._proto.command_session import command_session_pb2 as messages

KEY, TOKEN = "key-of-the-service", "token-of-the-machine"
_ENVELOPE = struct.Struct(">BI")
_END_OF_STREAM = 2


class PrimeService:
    """The service.

    Attributes:
        created: bodies of the requests that created machines.
        deleted: ids of deleted machines.
        processes: running processes by their session id.
        search_path: `PATH` in the machines.
        refuse_with: status with which requests that create a machine fail; None while they succeed.
    """

    def __init__(self) -> None:
        self.created: list[dict] = []
        self.deleted: list[str] = []
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._machines: dict[str, str] = {}
        self.refuse_with: int | None = None
        self.search_path = "/usr/bin:/bin"

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[_check_key])
        app.router.add_post("/api/v1/sandbox", self._create)
        app.router.add_post("/api/v1/sandbox/status:batchGet", self._statuses)
        app.router.add_post("/api/v1/sandbox/{machine}/auth", self._auth)
        app.router.add_delete("/api/v1/sandbox/{machine}", self._delete)
        session = "/gateway/{user}/{machine}/command_session.CommandSession"
        app.router.add_post(f"{session}/Start", self._start)
        app.router.add_post(f"{session}/SendInput", self._send_input)
        app.router.add_post(f"{session}/SendSignal", self._send_signal)
        return app

    async def _create(self, request: web.Request) -> web.Response:
        if self.refuse_with is not None:
            return web.json_response({"detail": "no capacity"}, status=self.refuse_with)
        self.created.append(await request.json())
        return web.json_response(_describe(f"machine-{uuid.uuid4()}", self.created[-1]))

    async def _statuses(self, request: web.Request) -> web.Response:
        machines = (await request.json())["sandbox_ids"]
        statuses = [{"sandbox_id": machine, "status": "RUNNING"} for machine in machines]
        return web.json_response({"statuses": statuses, "errors": []})

    async def _auth(self, request: web.Request) -> web.Response:
        address = {"gateway_url": f"{request.url.origin()}/gateway", "user_ns": "user"}
        expires = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        return web.json_response(
            {**address, "job_id": request.match_info["machine"], "token": TOKEN, "expires_at": expires}
        )

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["machine"])
        self.end_processes(request.match_info["machine"])
        return web.json_response({})

    def end_processes(self, machine: str | None = None) -> None:
        """Kill what runs in a machine; None: in all."""
        for session, process in self.processes.items():
            if machine not in (None, self._machines[session]):
                continue
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _start(self, request: web.Request) -> web.StreamResponse:
        start = messages.StartRequest.FromString((await request.read())[_ENVELOPE.size :])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            start.command.cmd, *start.command.args, stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": self.search_path}
        )
        self.processes[start.session_uuid] = process
        self._machines[start.session_uuid] = request.match_info["machine"]
        response = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await _send(response, messages.CommandSessionEvent(start={"pid": process.pid}))
            async for event in _outputs(process):
                await _send(response, event)
            end = {"exit_code": await process.wait(), "exited": True}
            await _send(response, messages.CommandSessionEvent(end=end))
            await response.write(_ENVELOPE.pack(_END_OF_STREAM, 2) + b"{}")
        return response

    async def _send_input(self, request: web.Request) -> web.Response:
        message = messages.SendInputRequest.FromString(await request.read())
        process = self.processes[message.session.session_uuid]
        process.stdin.write(message.input.stdin)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return web.Response(content_type="application/proto")

    async def _send_signal(self, request: web.Request) -> web.Response:
        message = messages.SendSignalRequest.FromString(await request.read())
        with contextlib.suppress(ProcessLookupError):
            self.processes[message.session.session_uuid].send_signal(message.signal)
        return web.Response(content_type="application/proto")


@web.middleware
async def _check_key(request: web.Request, handler) -> web.StreamResponse:
    key = TOKEN if request.path.startswith("/gateway/") else KEY
    if request.headers.get("Authorization") != f"Bearer {key}":
        raise web.HTTPUnauthorized
    return await handler(request)


def _describe(machine: str, body: dict) -> dict:
    now = datetime.now(UTC).isoformat()
    return {
        "id": machine, "name": body["name"], "dockerImage": body["docker_image"], "cpuCores": body["cpu_cores"],
        "memoryGB": body["memory_gb"], "diskSizeGB": body["disk_size_gb"], "diskMountPath": "/", "gpuCount": 0,
        "vm": True, "status": "RUNNING", "timeoutMinutes": body["timeout_minutes"], "createdAt": now, "updatedAt": now,
    }  # fmt: skip


async def _send(response: web.StreamResponse, event: messages.CommandSessionEvent) -> None:
    payload = messages.StartResponse(event=event).SerializeToString()
    await response.write(_ENVELOPE.pack(0, len(payload)) + payload)


async def _outputs(process: asyncio.subprocess.Process) -> AsyncIterator[messages.CommandSessionEvent]:
    events: asyncio.Queue[messages.CommandSessionEvent | None] = asyncio.Queue()

    async def read(name: str, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(2**16):
            events.put_nowait(messages.CommandSessionEvent(data={name: data}))
        events.put_nowait(None)

    async with asyncio.TaskGroup() as group:
        for name in ("stdout", "stderr"):
            group.create_task(read(name, getattr(process, name)))
        for _ in range(2):
            while (event := await events.get()) is not None:
                yield event


@contextlib.asynccontextmanager
async def running_service(monkeypatch, tmp_path) -> AsyncIterator[PrimeService]:
    """Start the service, and let the client library of this process find it and its key."""
    service = PrimeService()
    runner = web.AppRunner(service.application(), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    monkeypatch.setenv("PRIME_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("PRIME_API_BASE_URL", f"http://127.0.0.1:{port}")
    try:
        yield service
    finally:
        await runner.cleanup()
