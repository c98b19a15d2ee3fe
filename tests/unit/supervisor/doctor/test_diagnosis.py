"""Diagnoses of made-up runs: culprit, chain of waits, problems and notes."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prime_rl.liveness.heartbeat_monitor import HeartbeatRecord, KernelState, LivenessReport, ProcessState
from prime_rl.storage.checkpoint_artifacts import CheckpointCommit, ResumeRecord
from prime_rl.supervisor.doctor.collect import Disk, RunFacts, Settings, StoppedProcess
from prime_rl.supervisor.doctor.diagnosis import UNRESPONSIVE, RunState, add_runs, diagnose, is_settled
from prime_rl.supervisor.doctor.rendering import as_json, chain, show

NOW = 1000.0
STARTED = {"time": 900.0, "event": "started", "name": "trainer", "pid": 10}
LAST = CheckpointCommit(20, 0, {}, "")


def beat(name, phase="serve", waiting_for=None, since=990.0, written=NOW, deadline=None):
    role, pid = name.partition("_")[0], {"trainer_0": 11, "orchestrator": 12, "inference": 13, "rl": 9}.get(name, 14)
    log = f"/run/logs/{role}.log"
    return HeartbeatRecord(name, role, pid, "node7", "boot", 1, 5, phase, 3, deadline, since, waiting_for, log, written)


def report(beat, state=ProcessState.ALIVE, why="is alive", life=KernelState.RUNNING, for_seconds=0.0):
    return LivenessReport(beat.name, state, beat, for_seconds, life, True, why)


TRAINER = report(beat("trainer_0", "wait for batch 12", "orchestrator", since=966.0))
ORCHESTRATOR = report(beat("orchestrator", "sample", "inference", since=970.0))
INFERENCE = report(beat("inference"))
RL = report(beat("rl", "watch over the run"))
ALL = (INFERENCE, ORCHESTRATOR, RL, TRAINER)
RUN = RunFacts(Path("/run"), NOW, 2.0, ALL, owner=9, events=(STARTED,), settings=Settings(60, 2))


def with_(*changed, **fields):
    """Diagnose the run with changed reports."""
    by_name = {v.name: v for v in RUN.reports} | {v.name: v for v in changed}
    return diagnose(replace(RUN, reports=tuple(by_name.values()), **fields))


def test_diagnose_all_alive_is_healthy():
    result = with_()
    assert (result.state, result.problems, result.culprit) == (RunState.RUNNING, (), None)
    assert [p.name for p in result.chain] == ["trainer_0", "orchestrator", "inference"]


@pytest.mark.parametrize("state", UNRESPONSIVE)
def test_diagnose_unresponsive_end_of_the_chain_is_the_culprit(state):
    lost = report(INFERENCE.heartbeat, state, "has written no heartbeat for 7 s")
    result = with_(lost)
    assert (result.culprit, result.healthy) == ("inference", False)
    assert result.problems[0].text.startswith("inference (pid 13 on node7) has written no heartbeat for 7 s")
    assert "/run/logs/inference.log" in result.problems[0].text
    line = chain(result.chain, result.processes)
    assert line.startswith(
        "trainer_0: wait for batch 12 (34 s) <- orchestrator: sample (30 s) <- inference has written"
    )


def test_diagnose_several_silent_processes_lists_the_awaited_one_first():
    silent = (report(v.heartbeat, ProcessState.SILENT, "has written no heartbeat for 7 s") for v in (RL, INFERENCE))
    assert [p.culprit for p in with_(*silent).problems] == ["inference", "rl"]


@pytest.mark.parametrize("name", ["trainer_0", "orchestrator", "inference", "rl"])
def test_diagnose_stopped_process_is_reported_before_it_is_silent(name):
    before = next(v for v in ALL if v.name == name)
    result = with_(report(before.heartbeat, life=KernelState.STOPPED))
    assert result.culprit == name
    assert "is stopped (SIGSTOP?)" in result.problems[0].text
    assert result.problems[0].hint == f"`kill -CONT {before.heartbeat.pid}` continues it"


def test_diagnose_stopped_descendant_without_heartbeat_is_reported():
    worker = StoppedProcess(77, "orchestrator/77", "python -m env_worker", False)
    result = with_(stopped=(worker,))
    assert result.culprit == "orchestrator/77"
    assert "orchestrator/77 (pid 77, python -m env_worker) is stopped" in result.problems[0].text
    held = with_(stopped=(replace(worker, traced=True),))
    assert held.healthy and "debugger" in held.notes[0]
    server = replace(INFERENCE.heartbeat, pid=77, host="node2")  # of another host, with the same number
    result = with_(report(server, ProcessState.SILENT, "is silent", KernelState.UNKNOWN), stopped=(worker,))
    assert [p.culprit for p in result.problems] == ["inference", "orchestrator/77"]
    assert next(p for p in result.processes if p.name == "inference").state is ProcessState.SILENT


def test_diagnose_phase_beyond_its_limit_without_progress_is_stuck():
    late = beat("trainer_0", "wait for batch 12", "orchestrator", since=300.0, deadline=600.0)
    result = with_(report(late, for_seconds=6.0), watched_seconds=6.0)
    assert result.culprit == "trainer_0"
    assert "is stuck: 700 s in one phase with a limit of 600 s" in result.problems[0].text
    assert with_(report(late, for_seconds=0.0), watched_seconds=6.0).healthy, "progress while watched"
    assert with_(report(replace(late, phase_deadline_s=None), for_seconds=6.0), watched_seconds=6.0).healthy


def test_chain_ends_at_a_ring_and_follows_the_dead_one_of_several_ranks():
    result = with_(report(beat("orchestrator", "wait for version 12", "trainer")))
    assert [p.name for p in result.chain] == ["trainer_0", "orchestrator"]
    assert chain(result.chain, result.processes).endswith("trainer, which waits for the first")
    dead = report(replace(beat("trainer_1", "step 3"), pid=99), ProcessState.DEAD, "is gone")
    waiting = report(beat("orchestrator", "ship", "trainer"))
    result = diagnose(replace(RUN, reports=(report(beat("trainer_0", "step 3")), dead, waiting)))
    assert [p.name for p in result.chain] == ["orchestrator", "trainer_1"]
    assert result.culprit == "trainer_1"


def test_diagnose_awaited_role_without_heartbeat_is_reported():
    result = diagnose(replace(RUN, reports=(TRAINER,)))
    assert result.problems[0].text == "another process waits for orchestrator, which has never written a heartbeat"
    early = report(beat("orchestrator", "find the start point", "trainer", since=NOW - 5))
    assert diagnose(replace(RUN, reports=(early,))).healthy, "the trainer is being started"
    standalone = diagnose(replace(RUN, reports=(TRAINER, ORCHESTRATOR)))
    assert standalone.healthy, "a standalone server may have no heartbeat"
    assert chain(standalone.chain, standalone.processes).endswith("<- inference, which has no heartbeat")


ENDED = tuple(
    report(replace(v.heartbeat, phase="ended"), ProcessState.ENDED, "has ended", KernelState.GONE) for v in ALL
)


def test_diagnose_finished_or_stopped_run_is_healthy():
    done = {"time": 999.0, "event": "finished", "name": "rl"}
    result = diagnose(replace(RUN, reports=ENDED, owner=None, events=(STARTED, done)))
    assert (result.state, result.healthy, result.chain) == (RunState.FINISHED, True, ())
    killed = report(INFERENCE.heartbeat, ProcessState.DEAD, "is gone", KernelState.GONE)
    result = diagnose(replace(RUN, reports=(killed, *ENDED[1:]), owner=None, events=(STARTED, done)))
    assert result.healthy and result.notes == ("inference (pid 13 on node7) wrote no last heartbeat",)
    stopped = diagnose(replace(RUN, owner=None, events=(STARTED, done | {"detail": "stopped by SIGTERM"})))
    assert (stopped.state, stopped.healthy) == (RunState.STOPPED, True)
    for step, state in ((59, RunState.FINISHED), (30, RunState.STOPPED)):
        alone = replace(RUN, reports=ENDED, owner=None, events=(), trained={"step": step})
        assert diagnose(alone).state is state, "without `rl`"


def test_diagnose_failed_run_reports_culprit_cause_and_resume_command():
    failed = {"time": 999.0, "event": "failed", "name": "trainer", "role": "trainer", "code": -9,
              "detail": "was killed by SIGKILL"}  # fmt: skip
    facts = replace(RUN, reports=ENDED, owner=None, events=(STARTED, failed), checkpoints=(LAST,))
    result = diagnose(facts)
    assert (result.state, result.culprit) == (RunState.FAILED, "trainer")
    assert result.problems[0].text == "trainer was killed by SIGKILL; log /run/logs/trainer.log"
    assert "checkpoint 20" in result.problems[0].hint and "--ckpt.resume-step -1" in result.problems[0].hint
    explained = diagnose(replace(facts, errors={"trainer": "the loss is not finite"}))
    assert explained.problems[0].text.startswith("trainer was killed by SIGKILL: the loss is not finite; log")
    line = "trainer: the line of the console (log /elsewhere/trainer.log)"
    error = {"time": 999.1, "event": "error", "name": "trainer", "detail": line}
    [problem] = diagnose(replace(facts, events=(STARTED, failed, error))).problems
    assert (problem.text, problem.culprit) == (line, "trainer")
    assert with_(events=(STARTED, failed, STARTED)).state is RunState.RUNNING, "it was resumed"
    of_run = STARTED, failed | {"name": "run_a"}
    assert with_(events=of_run).state is RunState.RUNNING, "the other runs continue"
    assert with_(root=Path("/out/run_a"), events=of_run).state is RunState.FAILED, "it was started by its own `rl`"


def test_diagnose_run_with_all_processes_killed_is_dead():
    gone = tuple(report(v.heartbeat, ProcessState.DEAD, "is gone", KernelState.GONE) for v in ALL)
    result = diagnose(replace(RUN, reports=gone, owner=None))
    assert (result.state, result.culprit) == (RunState.DEAD, "inference")
    assert "wrote no last heartbeat" in result.problems[0].text and result.problems[0].hint is None
    result = diagnose(replace(RUN, reports=gone, owner=None, errors={"orchestrator": "no route"}))
    assert result.problems[0].text == "orchestrator has failed: no route"


def test_diagnose_run_without_rl_names_the_process_that_failed_first():
    def gone(name, phase, error=None, written=NOW, description="has failed"):
        heartbeat = replace(beat(name, phase, written=written), error=error)
        return report(heartbeat, ProcessState.DEAD, description, KernelState.GONE)

    def first_of(*reports):
        return diagnose(replace(RUN, reports=reports, owner=None, events=())).problems[0].text

    later = gone("orchestrator", "failed")
    where = "trainer_0 (pid 11 on node7)"
    assert (
        first_of(later, gone("trainer_0", "failed", None, NOW - 9)) == f"{where} has failed; log /run/logs/trainer.log"
    )
    known = gone("trainer_0", "failed", "no GPU", NOW - 9)
    assert first_of(later, known) == f"{where} has failed: no GPU; log /run/logs/trainer.log"
    killed = gone("trainer_0", "step 3", None, NOW - 9, "is gone")
    assert "and trainer_0 wrote no last heartbeat" in first_of(later, killed)
    text = first_of(killed, gone("trainer_1", "failed", "no GPU"))
    assert "trainer_1 (pid 14 on node7) has failed: no GPU; trainer_0 wrote no last heartbeat" in text


def test_diagnose_full_disk_or_no_process_is_a_problem():
    disk = Disk(free=2 * 10**9, total=10**10, used={}, version=10**9, checkpoint=3 * 10**9)
    assert with_(disk=disk).healthy, "without checkpoints a version is all that is written"
    result = with_(disk=disk, settings=Settings(60, 2, "checkpoints"))
    assert result.problems[0].text == "the disk has 2.0 GB left, and the next version and checkpoint need 4.0 GB"
    assert diagnose(RunFacts(Path("/run"))).state is RunState.QUIET


def test_diagnose_notes_warnings_environments_checkpoints_branch_and_restarts():
    again = {"time": 940.0, "event": "restarted", "name": "orchestrator", "detail": "was killed by SIGKILL"}

    def warning(kind, env, count, text):
        return {"time": RUN.now - 60, "kind": kind, "env": env, "count": count, "text": text}

    result = with_(
        events=(STARTED, again, again | {"time": 970.0}),
        broken={"step_30.tmp": "is not a name of a checkpoint", "step_30": "was not finished: COMMITTED is missing"},
        resume=ResumeRecord(20, 1),
        settings=Settings(60, 2, host_environments=("coding",)),
        warnings=(
            warning("worker", "a", 1, "first"), warning("group", "b", 1, "other"), warning("worker", "a", 10, "tenth"),
            {"time": RUN.now, "text": "of an earlier release"},
        ),
    )  # fmt: skip
    assert result.healthy
    assert sorted(result.notes) == [
        "branch 1 began at step 20",
        "checkpoint step_30 is being written, or was not finished",
        "checkpoint step_30.tmp is not usable: is not a name of a checkpoint",
        'environment coding may execute model output on this machine (runtime = "subprocess")',
        "of an earlier release (0 s ago)",
        "orchestrator was restarted 2 times; the last time 30 s ago: was killed by SIGKILL",
        "other (60 s ago)",
        "tenth (60 s ago)",
    ]


def test_add_runs_names_a_stopped_trainer_once():
    stopped, waiting = (
        report(TRAINER.heartbeat, life=KernelState.STOPPED),
        report(beat("orchestrator", "x", "trainer", since=NOW - 60)),
    )
    lost = report(ORCHESTRATOR.heartbeat, ProcessState.DEAD, "is gone")
    found = [diagnose(replace(RUN, root=Path(f"/run/run_{reports[0].name}"), reports=reports, owner=None, events=()))
             for reports in ((lost, stopped), (waiting,), (stopped, ORCHESTRATOR))]  # fmt: skip
    assert [len(one.problems) for one in found] == [2, 1, 1]
    trainer = diagnose(replace(RUN, reports=(replace(stopped, heartbeat=beat("trainer_0", "iteration 9")), RL)))
    shared = add_runs(trainer, found)
    assert [p.culprit for p in shared.problems] == ["trainer_0", "run_orchestrator/orchestrator"]
    assert (shared.facts.settings.max_steps, len(shared.runs)) == (None, 3)


def test_as_json_contains_state_chain_and_steps():
    silent = report(INFERENCE.heartbeat, ProcessState.SILENT, "has written no heartbeat")
    shipped = {"step": 12, "policy/version": 11.0, "staleness/max": 1}
    result = as_json(with_(silent, trained={"step": 11}, batches=(shipped,), version=12))
    assert (result["state"], result["healthy"], result["culprit"]) == ("running", False, "inference")
    assert result["chain"] == ["trainer_0", "orchestrator", "inference"]
    assert result["steps"] == {"trained": 12, "shipped": 13, "max_steps": 60, "published": 12, "sampled_from": 11.0,
                             "staleness": 1, "async_level": 2}  # fmt: skip


def test_show_a_thousand_ranks_fits_on_a_screen():
    ranks = [report(replace(beat(f"trainer_{n}", "step 3"), pid=100 + n)) for n in range(1000)]
    ranks[700] = replace(ranks[700], state=ProcessState.SILENT, description="has written no heartbeat for 7 s")
    console = Console(file=io.StringIO(), width=160, markup=False)
    show(diagnose(replace(RUN, reports=(*ranks, RL))), console)
    shown = console.file.getvalue()
    assert "trainer_3" in shown and "trainer_700" in shown and "trainer_500" not in shown
    assert "995 more trainer" in shown
    assert len(shown.splitlines()) < 20


def test_is_settled_only_after_each_process_wrote_a_heartbeat():
    first = {v.name: v.heartbeat for v in ALL}
    later = [report(replace(v.heartbeat, beat=6)) for v in ALL]
    assert is_settled(first, later)
    assert not is_settled(first, [*later[1:], INFERENCE])
    assert is_settled(first, [*later[1:], report(INFERENCE.heartbeat, ProcessState.DEAD)])
    assert is_settled(first, [*later[1:], report(INFERENCE.heartbeat, life=KernelState.STOPPED)])
    late = replace(TRAINER.heartbeat, beat=6, phase_deadline_s=10.0)
    assert not is_settled(first, [*later[:-1], report(late)]), "possibly stuck: observe whether it makes progress"


def test_diagnose_batches_without_learning_signal_are_a_finding():
    batches = tuple({"step": step, "batch/zero_advantage_groups": 1.0, "reward/mean": 0.0} for step in range(3))
    [finding] = diagnose(replace(RUN, lines={"orchestrator": batches})).findings
    assert finding.startswith("all advantages of batches 0 to 2 are 0")
    assert diagnose(replace(RUN, lines={"orchestrator": batches[:2]})).findings == ()


def test_diagnose_unstable_training_names_the_checkpoint_from_before():
    rows = tuple({"step": step, "mismatch_kl": 0.0 if step < 25 else 9.0} for step in range(40))
    facts = replace(RUN, lines={"trainer": rows}, checkpoints=(LAST, replace(LAST, step=30)))
    [finding] = diagnose(facts).findings
    assert finding.endswith("and resume from checkpoint 20 (ckpt.resume_step)")


def test_diagnose_failed_groups_are_counted_once():
    warning = {"kind": "group", "env": "math", "count": 10, "text": "10 of 12 failed: KeyError", "cause": "KeyError"}
    result = diagnose(replace(RUN, warnings=(warning,)))
    assert [line.count("KeyError") for line in (*result.findings, *result.notes)] == [1]


def test_diagnose_bottleneck_counts_steps_since_the_last_start_or_resume():
    row = {"time/step": 2.0, "time/train": 1.0, "time/wait_for_batch": 1.0, "time/wait_for_policy": 0.0}
    rows = [{**row, "step": n, "time": 2.0 * n + (500 if n >= 20 else 0)} for n in range(10, 25)]
    facts = replace(RUN, lines={"trainer": rows, "orchestrator": rows}, events=(), resume=ResumeRecord(20, 1))
    found = str(diagnose(facts).bottleneck)
    assert found.startswith("inference is the bottleneck: the trainer waited 50% and") and "last 4 steps" in found
    assert as_json(diagnose(facts))["bottleneck_window"] == [540.0, 548.0]
    assert as_json(diagnose(facts))["bottleneck_is_large"] is True
    assert diagnose(replace(facts, events=({"time": 545.0, "event": "restarted"},))).bottleneck is None
