"""A whole run on one node, from its configuration to its exit code."""

import asyncio
from contextlib import suppress

from rich.console import Console

from prime_rl.configs.rl import RLConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.plain import visible
from prime_rl.run.heart import Heartbeat
from prime_rl.run.heartbeat import forget
from prime_rl.run.paths import RunPaths
from prime_rl.run.surroundings import killers
from prime_rl.supervisor.bench import benchmark
from prime_rl.supervisor.checks import check_before_start, clear_earlier_run, unreachable_servers
from prime_rl.supervisor.events import Events
from prime_rl.supervisor.lock import hold_lock
from prime_rl.supervisor.lookout import Lookout
from prime_rl.supervisor.progress import Display
from prime_rl.supervisor.roles import make_roles
from prime_rl.supervisor.supervise import Limits, Outcome, how, supervise, tail


def run(config: RLConfig) -> int:
    """Run to the end and say how it went.

    Returns:
        The exit code: 0, or 128 + the signal that stopped the run.

    Raises:
        ConfigError: bad input, found here or by one of the processes.
        RunError: a process failed.
    """
    console = Console(highlight=False, markup=False)
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
    roles = make_roles(config, paths)
    for role in roles:
        forget(paths, role.name, keep=())  # what the processes of an earlier run said last
    events = Events(paths.events, lambda line: console.print(visible(line), soft_wrap=True))
    lookout = Lookout(paths, config.heartbeat.limits, events)
    with Heartbeat(paths, "rl", "rl") as heart:
        heart.enter("watch over the run")
        heart.follow(asyncio.get_running_loop())
        work = asyncio.ensure_future(supervise(roles, Limits(grace=config.grace_seconds), events, lookout))
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
    told = role.told()
    if told is not None and told["code"] == 2 and (code or 0) > 0:
        return ConfigError(f"{role.name}: {told['message']} (log {role.log})")
    lines = tail(role.log)
    if lines:
        console.print(f"last lines of {role.log}:", style="bold", soft_wrap=True)
        for line in lines:
            console.print(f"  {visible(line)}", soft_wrap=True)
    why = outcome.reason or (told["message"] if told is not None and (code or 0) > 0 else None)
    perhaps = f" ({said})" if code and code < 0 and why is None and (said := killers(-code)) else ""
    return RunError(f"{role.name} {how(code)}{f': {why}' if why else ''}; log {role.log}{perhaps}")
