"""A whole run on one node, from its configuration to its exit code."""

import asyncio
import json
import signal
from contextlib import suppress
from typing import Any

from rich.console import Console

from prime_rl.configs.rl import RLConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.bench import benchmark
from prime_rl.supervisor.checks import check_before_start, clear_earlier_run, unreachable_servers
from prime_rl.supervisor.children import Child
from prime_rl.supervisor.lock import hold_lock
from prime_rl.supervisor.progress import Display
from prime_rl.supervisor.roles import make_roles
from prime_rl.supervisor.supervise import Outcome, supervise, tail


def run(config: RLConfig) -> int:
    """Run to the end and say how it went.

    Returns:
        The exit code: 0, or 128 + the signal that stopped the run.

    Raises:
        ConfigError: bad input, found here or by one of the processes.
        RunError: a process failed.
    """
    console = Console(highlight=False)
    paths = config.run_paths
    with hold_lock(paths):
        check_before_start(config)
        for old in clear_earlier_run(config, paths):
            console.print(
                f"put aside {old} of an earlier run"
                if old == paths.checkpoints_dir
                else f"removed {old} of an earlier run"
            )
        for url in unreachable_servers(config):
            console.print(f"warning: no server at {url} yet; `rl` starts one itself with --inference")
        outcome = benchmark(config, paths, console) if config.bench else _train(config, paths, console)
    if outcome.left:
        console.print(f"warning: processes {list(outcome.left)} could not be ended")
    if outcome.stopped_by is not None:
        console.print(f"stopped by {outcome.stopped_by.name}; all processes have ended")
        return 128 + outcome.stopped_by
    if outcome.culprit is not None:
        raise _explain(outcome, console)
    return 0


def _train(config: RLConfig, paths: RunPaths, console: Console) -> Outcome:
    display = Display(paths, config.max_steps, console)
    outcome = asyncio.run(_run(config, paths, display, console))
    display.refresh()
    if outcome.ok or display.story.steps:
        console.print(display.summary())
    return outcome


async def _run(config: RLConfig, paths: RunPaths, display: Display, console: Console) -> Outcome:
    def started(child: Child) -> None:
        console.print(f"started {child.role.name} (pid {child.pid}), log {child.role.log}", soft_wrap=True)

    work = asyncio.ensure_future(supervise(make_roles(config, paths), started=started))
    following = asyncio.ensure_future(display.follow())
    await asyncio.wait({work, following}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        # The display failed; the run goes on without it.
        console.print(f"warning: no progress is shown: {following.exception()!r}")
        await asyncio.wait({work})
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    return work.result()


def _explain(outcome: Outcome, console: Console) -> ConfigError | RunError:
    """Name the culprit, with what it said itself; show the last lines of its log unless the input was bad."""
    assert outcome.culprit is not None
    role, code = outcome.culprit, outcome.code
    told = _told(outcome)
    if told is not None and told["code"] == 2:
        return ConfigError(f"{role.name}: {told['message']} (log {role.log})")
    lines = tail(role.log)
    if lines:
        console.print(f"last lines of {role.log}:", style="bold", soft_wrap=True)
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    if code is None:
        how = "did not end after the last step"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}" + ("" if code else " before the run was over")
    why = f": {told['message']}" if told else ""
    return RunError(f"{role.name} {how}{why}; log {role.log}")


def _told(outcome: Outcome) -> dict[str, Any] | None:
    """The error that the culprit left behind, unless a signal killed it."""
    assert outcome.culprit is not None
    if outcome.code is None or outcome.code <= 0:
        return None
    with suppress(OSError, ValueError):
        error = json.loads(outcome.culprit.error.read_text())
        return error if {"code", "message"} <= error.keys() else None
    return None
