"""`page <output_dir>...`: show runs in a browser, or export one."""

import argparse
import json
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.core.api_key import API_KEY_VAR
from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.ports import join_host_port, listen
from prime_rl.storage.file_locks import check_run_format
from prime_rl.supervisor.doctor.collect import contains_run

if TYPE_CHECKING:
    from prime_rl_page.run_data.run_view import RunList, RunView

_DEFAULT_PORT = 8420
_CLOSE_SECONDS = 2
"""Open streams end by themselves within one interval."""


@command
def main() -> None:
    """Serve the page until Ctrl-C, or write a report or a trace."""
    arguments = _parse(sys.argv[1:])
    from prime_rl_page.run_data.run_view import RunList  # not needed by `--help`

    directories = [Path(directory) for directory in arguments.output_dir]
    if missing := [directory for directory in directories if not directory.is_dir()]:
        raise ConfigError(f"{missing[0]} does not exist; pass the output_dir of a run (looked in {Path.cwd()})")
    runs = RunList(directories)
    if arguments.report is not None:
        _write_report(runs.read(), Path(arguments.report))
    elif arguments.trace is not None:
        _write_trace(runs.read(), Path(arguments.trace))
    else:
        _serve(runs, arguments.host, arguments.port, arguments.api_key_var)


def _parse(argv: list[str]) -> argparse.Namespace:
    text = "Show live, finished and copied runs in a browser. Reads only their directories and changes nothing."
    parser = ArgumentParser(prog="page", description=text)
    parser.add_argument("output_dir", nargs="+", help="run directories, or directories that contain some")
    parser.add_argument("--port", type=int, default=_DEFAULT_PORT, help=f"port (default {_DEFAULT_PORT}; 0: any)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1); another one needs a key")
    parser.add_argument("--api-key-var", default=API_KEY_VAR, help=f"environment variable of the key ({API_KEY_VAR})")
    parser.add_argument("--report", metavar="FILE", help="write one HTML file that opens without a server, and exit")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline as Chrome trace JSON, and exit")
    return parser.parse_args(argv)


def _serve(runs: "RunList", host: str, port: int, key_variable: str) -> None:
    import uvicorn

    from prime_rl_page.page_access import PageAccess
    from prime_rl_page.page_app import make_app

    access = PageAccess.for_address(host, key_variable)
    with listen(host, port, f"--port {port}") as listener:  # a browser waits until it is served
        bound = listener.getsockname()[1]
        threading.Thread(target=_read_runs, args=(runs,), daemon=True).start()
        with suppress(OSError):  # the disk of the log is full; the page itself writes nothing
            found = runs.read()
            count = f"{len(found)} run{'s' if len(found) != 1 else ''}"
            print(f"page: http://{join_host_port(host, bound)} shows {count}", flush=True)
            for run in found:
                check_run_format(run.paths)
                if not contains_run(run.paths):
                    print(f"page: {run.paths.root} contains no run yet; it is shown when it starts", flush=True)
        app = make_app(runs, access, is_closing=lambda: server.should_exit)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_CLOSE_SECONDS)
        server = uvicorn.Server(config)
        server.run(sockets=[listener])


def _read_runs(runs: "RunList") -> None:
    """Read the metrics before the browser asks for them, which takes seconds for a large run."""
    for run in runs.read():
        run.refresh()


def _write_report(runs: "list[RunView]", file: Path) -> None:
    from prime_rl_page.page_report import make_report

    run = _only(runs, "--report")
    text = make_report(run)
    with translate_error(OSError, lambda error: ConfigError(f"--report: {file} cannot be written: {error.strerror}")):
        file.write_text(text)
    print(f"report: {file}, {len(text.encode()) / 1e6:.1f} MB")


def _write_trace(runs: "list[RunView]", file: Path) -> None:
    from prime_rl_page.run_data.timeline_spans import chrome_trace

    run = _only(runs, "--trace")
    timeline = run.read_timeline()
    if not timeline.num_spans:
        raise ConfigError(f"--trace: {run.paths.root} contains no timeline/*.jsonl; its version did not write one")
    with translate_error(OSError, lambda error: ConfigError(f"--trace: {file} cannot be written: {error.strerror}")):
        file.write_text(json.dumps(list(chrome_trace(timeline))))
    print(f"trace: {file} has {timeline.num_spans} phases; open it at https://ui.perfetto.dev")


def _only(runs: "list[RunView]", option: str) -> "RunView":
    if len(runs) != 1:
        raise ConfigError(f"{option} takes one run, and {len(runs)} are given; pass one run directory")
    if not contains_run(runs[0].paths):
        raise ConfigError(f"{option}: {runs[0].paths.root} contains no run")
    return runs[0]


if __name__ == "__main__":
    main()
