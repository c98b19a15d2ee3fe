"""`rl`: a whole run, from its configuration to its exit code."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from rich.console import Console

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.logs.log_rotation import rotating_logs
from prime_rl.core.os_errors import likely_signal_cause
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.liveness.file_locks import check_no_writer, hold_run_lock
from prime_rl.liveness.heartbeat_monitor import NODE, remove_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter, record_interrupted_phases
from prime_rl.monitors.bench_report import print_bench_report
from prime_rl.rollouts.environments.environment_identity import identify_all
from prime_rl.rollouts.environments.example_count import count_examples
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.child_processes import BAD_INPUT, describe_exit
from prime_rl.supervisor.console.console_progress import ConsoleProgress, DisconnectableOutput
from prime_rl.supervisor.health_monitor import HealthMonitor
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.lifecycle_events import EventLog
from prime_rl.supervisor.nodes.placement import spread_over_nodes
from prime_rl.supervisor.page_process import serve_page
from prime_rl.supervisor.preflight import (
    check_before_start,
    clear_run_directory,
    starts_without_checkpoint,
    unreachable_servers,
)
from prime_rl.supervisor.supervisor import Outcome, SupervisorTimeouts, supervise


def run(config: RLConfig, keep_serving: bool = False) -> int:
    """Run to the end, report the outcome, and return the exit code: 0, or 128 + the signal that stopped the run.

    With `keep_serving`, inference serves after the last step until a signal arrives.

    Raises:
        ConfigError: bad input, found here or by one of the processes.
        RunError: a process failed, or one that was started separately writes the run directory.
    """
    console = Console(file=cast("IO[str]", DisconnectableOutput(sys.stdout)), highlight=False, markup=False)
    paths = config.run_paths
    config = spread_over_nodes(config)
    with hold_run_lock(paths):
        check_no_writer(paths)
        check_before_start(config)
        orchestrator = identify_all(
            config.orchestrator, "orchestrator.", lambda text: console.print(f"warning: {text}", soft_wrap=True)
        )
        config = limit_to_epochs(config.model_copy(update={"orchestrator": orchestrator}))
        for old in clear_run_directory(config, paths):
            action = "archived" if old == paths.checkpoints_dir else "removed"
            console.print(f"{action} {old} of an earlier run", soft_wrap=True)
        if starts_without_checkpoint(config):
            console.print(f"warning: {paths.root} has no complete checkpoint: the run starts at step 0", soft_wrap=True)
        for url in unreachable_servers(config):
            console.print(f"warning: no server at {url} yet; `rl` starts its own with --inference", soft_wrap=True)
        if config.bench:
            outcome = _benchmark(config, paths, console)
        else:
            display = ConsoleProgress(paths, config.max_steps, console)
            outcome = asyncio.run(_run(config, paths, display, console, keep_serving))
            display.refresh()
            if outcome.ok or display.has_new_steps:
                console.print(display.summary())
    if outcome.left:
        console.print(f"warning: processes {list(outcome.left)} could not be ended", soft_wrap=True)
    if outcome.stopped_by is not None:
        saved = find_checkpoints(paths.root / config.ckpt.path).steps if config.ckpt is not None else []
        hint = f"; checkpoint {saved[-1]} is saved: continue with --ckpt.resume-step -1" if saved else ""
        console.print(f"stopped by {outcome.stopped_by.name}; all processes have ended{hint}", soft_wrap=True)
        return 128 + outcome.stopped_by
    if outcome.culprit is not None:
        raise _explain(outcome, console)
    return 0


def limit_to_epochs(config: RLConfig) -> RLConfig:
    """Return the configuration with `max_steps` of all processes reduced to `max_epochs`.

    Raises:
        ConfigError: an environment cannot be loaded, or the epochs are less than one step.
    """
    if config.max_epochs is None or config.bench:
        return config
    examples = count_examples(config.orchestrator.env)
    per_step = config.orchestrator.batch_size // config.orchestrator.rollouts_per_example
    steps = int(config.max_epochs * examples / per_step)
    if not steps:
        raise ConfigError(
            f"max_epochs = {config.max_epochs:g} of {examples} examples is less than one step of {per_step}; increase "
            "it or reduce orchestrator.batch_size"
        )
    limit = {"max_steps": steps if config.max_steps is None else min(steps, config.max_steps)}
    parts = {name: getattr(config, name).model_copy(update=limit) for name in ("trainer", "orchestrator")}
    return config.model_copy(update={**limit, **parts})


async def _run(
    config: RLConfig, paths: RunPaths, display: ConsoleProgress, console: Console, keep_serving: bool
) -> Outcome:
    specs = make_process_specs(config, paths)
    record_interrupted_phases(paths)
    for role in ("rl", NODE, *(spec.name for spec in specs)):
        remove_heartbeats(paths, role, keep=())  # of an earlier start
    events = EventLog(paths.events, display.show_event)
    health = HealthMonitor(paths, config.heartbeat.limits, events, spans_nodes=bool(config.nodes))
    timeouts = SupervisorTimeouts(config.grace_timeout_seconds, config.checkpoint_grace_seconds)
    with HeartbeatWriter(paths, "rl", "rl") as heartbeat, rotating_logs(paths.logs_dir):
        heartbeat.enter("watch over the run")
        heartbeat.watch_event_loop(asyncio.get_running_loop())
        work = asyncio.ensure_future(supervise(specs, timeouts, events, health, keep_serving))
        following = asyncio.ensure_future(display.follow())
        page = None
        if config.page is not None:
            serving = serve_page(config.page, paths, display.show_event, health.process_tree.ignored)
            page = asyncio.ensure_future(serving)
        await asyncio.wait({work, following}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            # The display failed; the run continues without it.
            console.print(f"warning: progress display failed: {following.exception()!r}", soft_wrap=True)
            await asyncio.wait({work})
        others = [task for task in (following, page) if task is not None]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return work.result()


def _benchmark(config: RLConfig, paths: RunPaths, console: Console) -> Outcome:
    """Sample batches, then train on random batches of the same shape; print both tables.

    The two parts run one after the other: on a machine where both share the cores neither figure would be meaningful.
    """
    specs = [replace(spec, max_restarts=0) for spec in make_process_specs(config, paths)]
    trainer = [replace(spec, start_after=None) for spec in specs if spec.name == "trainer"]
    sampling = [replace(spec, is_last=spec.must_finish) for spec in specs if spec.name != "trainer"]
    events = EventLog(None, lambda line: console.print(line, markup=False, soft_wrap=True))
    for stage in (sampling, trainer):
        outcome = asyncio.run(supervise(stage, SupervisorTimeouts(), events, None))
        if not outcome.ok:
            return outcome
    print_bench_report(paths, ["orchestrator", "trainer"], console)
    return outcome


def _explain(outcome: Outcome, console: Console) -> ConfigError | RunError:
    """Name the culprit and its error; show the last lines of its log unless the input was bad."""
    assert outcome.culprit is not None
    spec, code = outcome.culprit, outcome.code
    error = spec.read_error() if (code or 0) > 0 else None
    if error is not None and error.code == BAD_INPUT:
        return ConfigError(f"{spec.name}: {error.message} (log {spec.log})")
    if lines := tail(spec.log):
        console.print(f"last lines of {spec.log}:", style="bold", soft_wrap=True)
        for line in lines:
            console.print(f"  {escape_control_chars(line)}", soft_wrap=True)
    cause = outcome.reason or (error.message if error is not None else None)
    hint = f" ({killers})" if code and code < 0 and cause is None and (killers := likely_signal_cause(-code)) else ""
    return RunError(f"{spec.name} {describe_exit(code)}{f': {cause}' if cause else ''}; log {spec.log}{hint}")


def tail(path: Path, lines: int = 15, most_bytes: int = 16384) -> list[str]:
    """The last lines of a log; [] if it does not exist."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read(most_bytes).decode(errors="replace").splitlines()[-lines:]
