"""`uv run doctor <output_dir>`: what a run does, who waits for whom, and what is wrong with it."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from prime_rl.configs.shared import HeartbeatConfig
from prime_rl.doctor.diagnosis import Diagnosis, RunState, diagnose, is_settled
from prime_rl.doctor.facts import is_run, read_facts, read_toml
from prime_rl.doctor.page import as_json, show
from prime_rl.run.heartbeat import Limits, State, Watch, read_beats
from prime_rl.run.paths import RunPaths

_LOOK_S = 1.0
_LOOKS = 2
"""Further looks after the first: who beats each second has said something new."""
_FILE_COLUMNS = 160
_AGAIN_S = 5.0
HEALTHY, WRONG, NO_RUN = 0, 1, 2


def main() -> None:
    """Print the state of a run; exit 0 if nothing is wrong, 1 if something is, 2 if there is no run."""
    try:
        sys.exit(_main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


def _main(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    paths = RunPaths(Path(arguments.output_dir))
    if not is_run(paths):
        print(f"error: {paths.root} holds no run; give the output_dir of one", file=sys.stderr)
        return NO_RUN
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=_FILE_COLUMNS)
    while True:
        diagnosis = examine(paths)
        if arguments.json:
            print(json.dumps(as_json(diagnosis)), flush=True)
        else:
            show(diagnosis, console)
        if not arguments.watch or diagnosis.state is not RunState.RUNNING:
            return HEALTHY if diagnosis.healthy else WRONG
        time.sleep(_AGAIN_S)  # what the user asked for


def examine(paths: RunPaths) -> Diagnosis:
    """Watch the heartbeats for a moment, longer if somebody says nothing, and judge."""
    limits = _limits(paths)
    watch, first = Watch(paths, limits), read_beats(paths)
    begin = time.monotonic()
    verdicts = watch.look()
    longest = int((limits.silence_s + 1) / _LOOK_S) + 1
    for look in range(longest if first else 0):
        over = all(verdict.state in (State.ENDED, State.DEAD) for verdict in verdicts)
        if over or (look >= _LOOKS and is_settled(first, verdicts)):
            break
        time.sleep(_LOOK_S)  # a heartbeat is watched as it beats: silence has no event
        verdicts = watch.look()
    return diagnose(read_facts(paths, tuple(verdicts), time.time(), time.monotonic() - begin))


def _limits(paths: RunPaths) -> Limits:
    told = read_toml(paths.run_toml).get("heartbeat", {})
    try:
        return HeartbeatConfig.model_validate(told).limits
    except ValidationError:  # of another version
        return HeartbeatConfig().limits


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="doctor", description="What a run does, who waits for whom, and what is wrong with it. Changes nothing."
    )
    parser.add_argument("output_dir", help="the run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="again and again, until the run is over")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
