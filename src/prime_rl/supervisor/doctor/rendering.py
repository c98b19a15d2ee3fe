"""Renders a diagnosis on one screen or as JSON. Control characters are escaped."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.liveness.heartbeat_monitor import ENDED, WAIT_FOR_SLOT, ProcessState
from prime_rl.supervisor.doctor.collect import RunFacts
from prime_rl.supervisor.doctor.diagnosis import UNRESPONSIVE, Diagnosis, Process, RunState, duration, size

FORMAT = "prime_rl.doctor/1"
_EVENTS = 8
_FOLDERS = 4
_MAX_ALIKE = 4
"""Responsive processes of one role that are shown one by one."""
_STYLE = {
    ProcessState.ALIVE: "green",
    ProcessState.ENDED: "dim",
    ProcessState.SILENT: "yellow",
    ProcessState.UNREACHABLE: "yellow",
}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis as `doctor` shows it on a terminal."""
    facts = diagnosis.facts
    style = "green" if diagnosis.healthy else "red"
    owner = f" (rl, pid {facts.owner})" if facts.owner is not None else ""
    _print(console, f"{facts.root}: {diagnosis.state}{owner}", f"bold {style}")
    for problem in diagnosis.problems:
        _print(console, f"  problem: {problem.text}", "red")
        if problem.hint:
            _print(console, f"           {problem.hint}")
    for finding in diagnosis.findings:
        _print(console, f"  finding: {finding}", "yellow")
    if diagnosis.bottleneck is not None:
        _print(console, f"  {diagnosis.bottleneck}", "yellow" if diagnosis.bottleneck.is_large else "dim")
    if diagnosis.chain:
        _print(console, f"  waiting: {chain(diagnosis.chain, diagnosis.processes)}")
    for note in diagnosis.notes:
        _print(console, f"  note: {note}", "yellow")
    if diagnosis.runs:
        console.print(_runs(diagnosis.runs))
    if diagnosis.processes:
        console.print(_processes(diagnosis.processes))
    console.print(_table(_figures(facts, "iterations" if diagnosis.runs else "trained")))
    if facts.events:
        console.print(_table(_events(facts)))


def chain(waiting: Sequence[Process], processes: Sequence[Process]) -> str:
    """One line: `trainer_0: wait for batch 12 (3 s) <- orchestrator: ship (9 s) <- inference is stopped`."""
    links = [
        f"{p.name} {p.why}" if p.unresponsive else f"{p.name}: {p.beat.phase} ({duration(p.phase_seconds)})"
        for p in waiting
    ]
    last, awaited = waiting[-1], waiting[-1].beat.waiting_for
    if not last.unresponsive and awaited:
        known = any(process.beat.role == awaited for process in processes)
        links.append(f"{awaited}, {'which waits for the first' if known else 'which has no heartbeat'}")
    return " <- ".join(links)


def summarize(run: Diagnosis) -> str:
    """State of a run of several in a few words, such as `training: step 3` or `orchestrator dead`."""
    facts = run.facts
    if (reason := facts.evicted or facts.refused) is not None:
        return f"{run.state}: {reason}"
    lost = next((process for process in run.processes if process.unresponsive), None)
    if lost is not None and run.state in (RunState.RUNNING, RunState.DEAD):
        return f"{lost.name} {lost.state}"
    if run.state is not RunState.RUNNING:
        return str(run.state)
    phase = next((process.beat.phase for process in run.processes if process.beat.role == "trainer"), None)
    if phase is None or phase == ENDED:
        return "ending" if phase else "starting"
    is_waiting = phase.startswith(WAIT_FOR_SLOT)
    return f"waiting{phase.removeprefix(WAIT_FOR_SLOT)}" if is_waiting else f"training: {phase}"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The object that `--json` prints."""
    facts = diagnosis.facts
    trained, shipped = facts.trained, facts.shipped
    return {
        "format": FORMAT,
        "run": str(facts.root),
        "time": facts.now,
        "state": str(diagnosis.state),
        "healthy": diagnosis.healthy,
        "culprit": diagnosis.culprit,
        "problems": [{"text": p.text, "culprit": p.culprit, "hint": p.hint} for p in diagnosis.problems],
        "findings": list(diagnosis.findings),
        "bottleneck": None if diagnosis.bottleneck is None else str(diagnosis.bottleneck),
        "bottleneck_is_large": diagnosis.bottleneck is not None and diagnosis.bottleneck.is_large,
        "bottleneck_window": None if diagnosis.bottleneck is None else list(diagnosis.bottleneck.window),
        "notes": list(diagnosis.notes),
        "chain": [process.name for process in diagnosis.chain],
        "processes": [
            {
                "name": p.name, "role": p.beat.role, "pid": p.beat.pid, "host": p.beat.host, "state": str(p.state),
                "why": p.why, "phase": p.beat.phase, "phase_s": round(p.phase_seconds, 3),
                "waiting_for": p.beat.waiting_for, "log": p.beat.log,
            }
            for p in diagnosis.processes
        ],
        "stopped": [{"pid": one.pid, "name": one.name, "command": one.command} for one in facts.stopped],
        "steps": {
            "trained": trained["step"] + 1 if trained else 0,
            "shipped": shipped["step"] + 1 if shipped else 0,
            "max_steps": facts.settings.max_steps,
            "published": facts.version,
            "sampled_from": shipped.get("policy/version"),
            "staleness": shipped.get("staleness/max"),
            "async_level": facts.settings.async_level,
        },
        "checkpoints": {"complete": [commit.step for commit in facts.checkpoints], "broken": dict(facts.broken)},
        "errors": dict(facts.errors),
        "disk": None if facts.disk is None else {"free": facts.disk.free, "used": facts.disk.used},
        "events": [dict(event) for event in facts.events[-_EVENTS:]],
        "runs": [{"name": run.facts.root.name, "summary": summarize(run), **as_json(run)} for run in diagnosis.runs],
    }  # fmt: skip


def _runs(runs: Sequence[Diagnosis]) -> Table:
    table = Table("run", "state", "trained", "reward", box=None, padding=(0, 2, 0, 2))
    for run in runs:
        state = Text(escape_control_chars(summarize(run)), "green" if run.healthy else "red")
        reward = _part("{:.3f}", run.facts.shipped.get("reward/mean"))
        table.add_row(run.facts.root.name, state, _trained(run.facts), reward)
    return table


def _trained(facts: RunFacts) -> str:
    most = f" of {facts.settings.max_steps}" if facts.settings.max_steps else ""
    return f"{facts.trained['step'] + 1 if facts.trained else 0}{most} steps"


def _processes(processes: Sequence[Process]) -> Table:
    table = Table("process", "pid", "node", "state", "phase", "for", "waiting for", box=None, padding=(0, 2, 0, 2))
    alike = Counter[tuple[str, ProcessState]]()
    for p in processes:
        beat = p.beat
        alike[beat.role, p.state] += 1
        if not p.unresponsive and alike[beat.role, p.state] > _MAX_ALIKE:
            continue
        state = Text(str(p.state), _STYLE.get(p.state, "red"))
        phase_seconds = "" if p.state is ProcessState.ENDED else duration(p.phase_seconds)
        texts = map(escape_control_chars, (beat.phase, phase_seconds, beat.waiting_for or ""))
        table.add_row(p.name, str(beat.pid), escape_control_chars(beat.host), state, *texts)
    for (role, same), count in alike.items():
        if same not in UNRESPONSIVE and count > _MAX_ALIKE:
            table.add_row(f"{count - _MAX_ALIKE} more {role}", "", "", Text(str(same), _STYLE.get(same, "")))
    return table


def _figures(facts: RunFacts, trained_label: str) -> Iterator[tuple[str, str]]:
    settings, trained, shipped = facts.settings, facts.trained, facts.shipped
    took = f", last step {trained['time/step']:.3g} s" if trained and trained.get("time/step") else ""
    yield trained_label, f"{_trained(facts)}{took}"
    if shipped:
        yield "shipped", f"batch {shipped['step']}" + _part(", reward {:.3f}", shipped.get("reward/mean"))
    if facts.version is not None:
        sampled = _part(", {:.0f} sampled from at the last batch", shipped.get("policy/version"))
        yield "version", f"{facts.version} published{sampled}"
    if shipped.get("staleness/max") is not None:
        bound = f" (limit {settings.async_level})" if settings.async_level is not None else ""
        yield "staleness", f"{shipped['staleness/max']:.0f}{bound}"
    steps = [str(commit.step) for commit in facts.checkpoints]
    if steps or settings.ckpt or facts.broken:
        broken = f"; incomplete: {', '.join(sorted(facts.broken))}" if facts.broken else ""
        yield "checkpoints", f"{', '.join(steps[-6:]) or 'none'} complete{broken}"
    for role, message in facts.errors.items():
        yield f"error of {role}", message
    if (disk := facts.disk) is not None:
        parts = ", ".join(f"{name} {size(part)}" for name, part in list(disk.used.items())[:_FOLDERS])
        used = size(sum(disk.used.values())) + (f" ({parts})" if parts else "")
        yield "disk", f"{size(disk.free)} free of {size(disk.total)}; the run uses {used}"


def _part(text: str, value: Any) -> str:
    return "" if value is None else text.format(value)


def _events(facts: RunFacts) -> Iterator[tuple[str, str]]:
    for event in facts.events[-_EVENTS:]:
        ago = f"{duration(facts.now - float(event.get('time', facts.now)))} ago"
        yield ago, " ".join(str(event[key]) for key in ("name", "event", "detail") if event.get(key) is not None)


def _table(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name, "dim"), Text(escape_control_chars(text)))
    return table


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(Text(escape_control_chars(line), style or ""), soft_wrap=True)
