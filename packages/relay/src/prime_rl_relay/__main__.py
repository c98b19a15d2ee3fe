"""`relay <output_dir>`: serve a run directory to other machines, and copy what other machines write."""

import argparse
import asyncio
import math
import re
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Literal

from prime_rl.core.api_key import RELAY_KEY_VAR
from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.ports import join_host_port, listen

_DEFAULT_PORT = 8430
_WRITERS: tuple[Literal["trainer", "orchestrator"], ...] = ("trainer", "orchestrator")
"""The processes whose files can be copied; options of the command."""


@command
def main() -> None:
    """Serve and copy until SIGINT or SIGTERM."""
    arguments = _parse(sys.argv[1:])
    asyncio.run(_run(arguments))


def _parse(argv: list[str]) -> argparse.Namespace:
    text = "Serve a run directory to other machines, and copy into it what their processes write."
    parser = ArgumentParser(prog="relay", description=text)
    parser.add_argument("output_dir", type=Path, help="the run directory on this machine; created for copies")
    for writer in _WRITERS:
        text = f"copy what the {writer} writes from the relays at these URLs, which have the same files"
        parser.add_argument(f"--{writer}", metavar="URL[,URL]", type=_urls, default=[], help=text)
    parser.add_argument("--port", type=int, default=_DEFAULT_PORT, help=f"port (default {_DEFAULT_PORT}; 0: any)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1); another one needs a key")
    text = f"environment variable of the key that all relays of the run share ({RELAY_KEY_VAR})"
    parser.add_argument("--api-key-var", default=RELAY_KEY_VAR, help=text)
    parser.add_argument("--poll-seconds", type=float, default=0.25, help="interval of the queries (default 0.25)")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.poll_seconds < math.inf:
        parser.error("--poll-seconds must be above 0")
    if not 0 <= arguments.port <= 65535:
        parser.error("--port must be between 0 and 65535")
    return arguments


def _urls(text: str) -> list[str]:
    urls = text.split(",")
    if wrong := [url for url in urls if not re.match(r"https?://[^/]", url)]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not a URL such as http://node1:{_DEFAULT_PORT}")
    return urls


async def _run(arguments: argparse.Namespace) -> None:
    from prime_rl.core.api_key import read_api_key  # neither this nor what follows is needed by `--help`
    from prime_rl.core.logs import set_up_logging
    from prime_rl.core.os_errors import wrap_os_errors
    from prime_rl.storage.file_locks import hold_role_lock
    from prime_rl.storage.paths import RunPaths
    from prime_rl.storage.relay.relay_client import RelayClient
    from prime_rl.storage.relay.run_files import RunFiles
    from prime_rl_relay.relay_app import RelayAccess, RelayServer, make_relay_app
    from prime_rl_relay.run_copier import RunCopier

    paths = RunPaths(arguments.output_dir)
    if not paths.root.is_dir() and not any(getattr(arguments, writer) for writer in _WRITERS):
        raise ConfigError(
            f"{paths.root} is no directory, and there is nothing to serve; pass the output_dir of a run, or copy one "
            "with --trainer or --orchestrator"
        )
    access = RelayAccess.for_address(arguments.host, arguments.api_key_var)
    with translate_error(OSError, lambda error: ConfigError(f"{paths.root} cannot be created: {error.strerror}")):
        paths.logs_dir.mkdir(parents=True, exist_ok=True)
    files = RunFiles(paths)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(arguments.host, arguments.port, f"--port {arguments.port}"))
        port = listener.getsockname()[1]
        set_up_logging("info", utc=False, file=paths.log(f"relay_{socket.gethostname()}_{port}"))
        server = RelayServer(make_relay_app(files, access))
        jobs = [asyncio.ensure_future(server.serve(sockets=[listener]))]
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
        for writer in _WRITERS:
            if urls := getattr(arguments, writer):
                hold_role_lock(paths, f"relay_{writer}", 0)
                client = await stack.enter_async_context(RelayClient(urls, read_api_key(arguments.api_key_var)))
                jobs.append(asyncio.ensure_future(RunCopier(files, client, writer, arguments.poll_seconds).run()))
        with suppress(OSError):  # stdout is closed
            print(f"relay: http://{join_host_port(arguments.host, port)} serves {paths.root}", flush=True)
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            with wrap_os_errors("copy files of the run", paths.root):
                for job in done:
                    job.result()
        finally:
            server.should_exit = True
            for job in jobs[1:]:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)


if __name__ == "__main__":
    main()
