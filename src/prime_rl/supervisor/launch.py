"""`rl`: a whole run, from its configuration to its exit code."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import IO, cast

from rich.console import Console

from prime_rl.configs.rl import PageConfig, RLConfig
from prime_rl.core.entry_point import ERROR_FILE
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.import_utils import packages_unlike_the_lock
from prime_rl.core.logs import rotating_logs
from prime_rl.core.os_errors import likely_signal_cause
from prime_rl.core.ports import find_free_port
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.liveness.heartbeat_monitor import ENGINE, NODE, remove_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter, record_interrupted_phases
from prime_rl.liveness.parent_process import with_parent_death_signal
from prime_rl.monitors.bench_report import print_bench_report
from prime_rl.monitors.bottleneck import speed_settings
from prime_rl.rollouts.environment_id import identify_all
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.file_locks import check_no_writer, hold_run_lock
from prime_rl.storage.model_files import check_on_hub
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import undo_interrupted_move
from prime_rl.supervisor.child_processes import BAD_INPUT, describe_exit
from prime_rl.supervisor.console_progress import ConsoleProgress, DisconnectableOutput, follow
from prime_rl.supervisor.health_monitor import HealthMonitor
from prime_rl.supervisor.input_check import InputCheck
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.lifecycle_events import EventLog
from prime_rl.supervisor.nodes.placement import spread_over_nodes
from prime_rl.supervisor.preflight import (
    check_before_start,
    check_trainer_to_join,
    clear_run_directory,
    gpus_that_are_not_there,
    starts_without_checkpoint,
    unreachable_servers,
    visible_gpus,
)
from prime_rl.supervisor.supervisor import Outcome, SupervisorTimeouts, supervise

_PAGE_STOP_SECONDS = 3.0
"""After SIGTERM to the page, before SIGKILL."""
_PAGE_KILL_SECONDS = 3.0
"""After SIGKILL: a file system that hangs must not hold up the run's end."""


def run(config: RLConfig, check: InputCheck, keep_serving: bool = False) -> int:
    """Run to the end, report the outcome, and return the exit code: 0, or 128 + the signal that stopped the run.

    Args:
        config: the run.
        check: has started.
        keep_serving: inference serves after the last step until a signal arrives.

    Raises:
        ConfigError: bad input, found here or by one of the processes.
        RunError: a process failed, or one that was started separately writes the run directory.
    """
    console = Console(file=cast("IO[str]", DisconnectableOutput(sys.stdout)), highlight=False, markup=False)
    paths = config.run_paths
    config = spread_over_nodes(config)
    if config.join is not None:
        check_trainer_to_join(config.join)  # before the lock creates a folder in a wrong directory
    with hold_run_lock(paths):
        check_no_writer(paths)
        undo_interrupted_move(paths)
        check_before_start(config)
        if (text := packages_unlike_the_lock()) is not None:
            console.print(f"warning: {text}", soft_wrap=True)
        config = config.change_orchestrators(
            lambda run: identify_all(
                run,
                "orchestrator.",
                lambda text: console.print(f"warning: {text}", soft_wrap=True),
                lambda text: console.print(text, soft_wrap=True),
            )
        )
        runs = config.orchestrators
        names = ", ".join({env.label: None for run in runs.values() for env in run.env})
        console.print(f"loading {names} to check the input", soft_wrap=True)
        check_on_hub(config.trainer.model.name, config.trainer.model.revision)
        config = limit_to_epochs(config, check.run(config))
        if (line := clear_run_directory(config, paths)) is not None:
            console.print(line, soft_wrap=True)
        for folder in (run.run_paths.root for run in runs.values() if starts_without_checkpoint(run)):
            console.print(f"warning: {folder} has no complete checkpoint: the run starts at step 0", soft_wrap=True)
        if (gpus := gpus_that_are_not_there(config)) is not None:
            console.print(f"warning: no GPU is visible, so the run uses the CPU, with {gpus}", soft_wrap=True)
        if visible_gpus():
            from prime_rl.supervisor.planning.plan_changes import warning_for  # a run without GPUs needs no plan

            if (text := warning_for(config)) is not None:
                console.print(f"warning: {text}", soft_wrap=True)
        for url in unreachable_servers(config):
            console.print(f"warning: no server at {url} yet; `rl` starts its own with --inference", soft_wrap=True)
        if config.bench:
            outcome = _benchmark(config, paths, console)
        else:
            displays = [
                ConsoleProgress(
                    run.run_paths, run.max_steps, console, name if len(runs) > 1 else "",
                    speed_settings({**config.model_dump(), "orchestrator": run.model_dump()}),
                )
                for name, run in config.orchestrators.items()
            ]  # fmt: skip
            outcome = asyncio.run(_run(config, paths, displays, console, keep_serving))
            for display in displays:
                display.refresh()
                if outcome.ok or display.has_new_steps:
                    console.print(display.summary())
    if outcome.left:
        console.print(f"warning: processes {list(outcome.left)} could not be ended", soft_wrap=True)
    if outcome.stopped_by is not None:
        folders = [run.run_paths.root / run.ckpt.path for run in runs.values() if run.ckpt is not None]
        saved = sorted({step for folder in folders for step in find_checkpoints(folder).steps[-1:]})
        hint = f"; checkpoint {saved[-1]} is saved: continue with --ckpt.resume-step -1" if saved else ""
        console.print(f"stopped by {outcome.stopped_by.name}; all processes have ended{hint}", soft_wrap=True)
        return 128 + outcome.stopped_by
    if outcome.culprit is not None:
        error, name = explain(outcome, console), outcome.culprit.name
        if not config.bench:
            EventLog(paths.events, console.print).add("error", name, role=name, code=outcome.code, detail=str(error))
        raise error
    return 0


def limit_to_epochs(config: RLConfig, examples: int) -> RLConfig:
    """Return the configuration with `max_steps` of all processes reduced to `max_epochs` of so many examples.

    Raises:
        ConfigError: the epochs are less than one step.
    """
    if config.max_epochs is None or config.bench:
        return config
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
    config: RLConfig, paths: RunPaths, displays: Sequence[ConsoleProgress], console: Console, keep_serving: bool
) -> Outcome:
    specs = make_process_specs(config, paths)
    runs = {name: run.run_paths for name, run in config.orchestrators.items() if config.runs}
    folders = {folder.root: folder for folder in (*runs.values(), paths)}.values()  # one, of a run that joins
    for folder in folders:
        record_interrupted_phases(folder)
        for role in ("rl", NODE, ENGINE, "orchestrator", *(spec.name for spec in specs)):
            remove_heartbeats(folder, role, keep=())  # of an earlier start
    show = displays[0].show_event
    events = EventLog(paths.events, show)
    health = HealthMonitor(paths, config.heartbeat.limits, events, spans_nodes=bool(config.nodes), runs=runs)
    timeouts = SupervisorTimeouts(config.grace_timeout_seconds, config.checkpoint_grace_seconds)
    with HeartbeatWriter(paths, "rl", "rl") as heartbeat, ExitStack() as logs:
        for folder in folders:
            logs.enter_context(rotating_logs(folder.logs_dir))
        heartbeat.enter("watch over the run")
        heartbeat.watch_event_loop(asyncio.get_running_loop())
        work = asyncio.ensure_future(supervise(specs, timeouts, events, health, keep_serving))
        following = asyncio.ensure_future(
            follow(displays, console, [paths, *(one for one in folders if one.root != paths.root)])
        )
        page = None
        if config.page is not None:
            serving = serve_page(config.page, paths, show, health.process_tree.ignored)
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


def explain(outcome: Outcome, console: Console) -> ConfigError | RunError:
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


async def serve_page(config: PageConfig, paths: RunPaths, show: Callable[[str], None], ignored: set[int]) -> None:
    """Serve the page until cancelled; `show` its address, and a warning if it ends by itself.

    `ignored` gets its process id: the supervisor must not take it for a process that a part of the run left behind.
    """
    log = paths.log("page")
    log.parent.mkdir(parents=True, exist_ok=True)
    port = config.port or find_free_port()
    command = [sys.executable, "-m", "prime_rl_page", str(paths.root), "--port", str(port)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(command),
            env={name: value for name, value in os.environ.items() if name != ERROR_FILE},
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )
    ignored.add(process.pid)
    show(f"page: http://127.0.0.1:{port}, log {log}")
    try:
        code = await process.wait()
        show(f"warning: the page {describe_exit(code)}; the run continues; log {log}")
    finally:
        ended = asyncio.ensure_future(process.wait())
        for stop, seconds in ((process.terminate, _PAGE_STOP_SECONDS), (process.kill, _PAGE_KILL_SECONDS)):
            if process.returncode is not None:
                break
            stop()
            await asyncio.wait({ended}, timeout=seconds)
