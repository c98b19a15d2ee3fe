"""`doctor <output_dir>`: diagnose a run. `doctor --install`, `doctor --sandbox`: check this machine."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from prime_rl.core.entry_point import ArgumentParser, command, exit_with_reader
from prime_rl.storage.file_locks import check_run_format
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.doctor.collect import contains_run
from prime_rl.supervisor.doctor.diagnosis import RunState, examine
from prime_rl.supervisor.doctor.rendering import as_json, show

_FILE_COLUMNS = 160
_WATCH_INTERVAL_SECONDS = 5.0


@command
def main() -> None:
    """Print the state of a run; exit with 0 if it is healthy, 1 if it has a problem, 2 without a run or a sandbox.

    With `--install`, the exit code is 1 if a check of the installation failed.
    """
    with exit_with_reader():
        code = _main(sys.argv[1:])
    sys.exit(code)


def _main(argv: Sequence[str]) -> int:
    description = "Diagnose a run: process states, what each is blocked on, the likely culprit. Changes nothing."
    parser = ArgumentParser(prog="doctor", description=description)
    parser.add_argument("output_dir", nargs="?", help="the run directory")
    parser.add_argument(
        "--sandbox", action="store_true", help="test whether this machine can isolate model-written code"
    )
    parser.add_argument("--install", action="store_true", help="check the installation: packages, GPUs, limits, hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="repeat every 5 seconds until the run is over")
    arguments = parser.parse_args(argv)
    if arguments.install:
        return _check_installation(arguments.output_dir, as_object=arguments.json)
    if arguments.sandbox:
        return _check_sandbox(as_object=arguments.json)
    if arguments.output_dir is None:
        parser.error("pass the output_dir of a run, --install or --sandbox")
    paths = RunPaths(Path(arguments.output_dir))
    if not contains_run(paths):
        print(f"error: {paths.root} contains no run; pass the output_dir of a run", file=sys.stderr)
        return 2
    check_run_format(paths)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    while True:
        diagnosis = examine(paths)
        if arguments.json:
            print(json.dumps(as_json(diagnosis)), flush=True)
        else:
            show(diagnosis, console)
        if not arguments.watch or diagnosis.state is not RunState.RUNNING:
            return 0 if diagnosis.healthy else 1
        time.sleep(_WATCH_INTERVAL_SECONDS)


def _check_installation(output_dir: str | None, *, as_object: bool) -> int:
    """Print one line per check, as soon as it is known; return 1 if one failed."""
    from prime_rl.supervisor.doctor.installation_check import CheckLevel, check_installation

    checks = []
    for check in check_installation(Path(output_dir or os.environ.get("OUTPUT_DIR") or "outputs")):
        checks.append(check)
        if not as_object:
            print(check, flush=True)
    if as_object:
        print(json.dumps([asdict(check) for check in checks]))
    return int(any(check.level is CheckLevel.FAIL for check in checks))


def _check_sandbox(*, as_object: bool) -> int:
    """Print whether this machine can isolate code; return 2 if it cannot."""
    from prime_rl.supervisor.doctor.installation_check import check_sandbox  # the diagnosis of a run does not need it

    report = check_sandbox()
    print(json.dumps(asdict(report)) if as_object else "\n".join(report.lines()))
    return 0 if report.isolated else 2


if __name__ == "__main__":
    main()
