"""What is said of made-up runs: who is to blame, who waits for whom, and when nothing is wrong."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prime_rl.doctor.diagnosis import RunState, diagnose, is_settled
from prime_rl.doctor.facts import Disk, Facts, Halted, Settings
from prime_rl.doctor.page import as_json, chain, show
from prime_rl.run.checkpoints import Commit, Resume
from prime_rl.run.heartbeat import Beat, Life, State, Verdict

NOW = 1000.0
STARTED = {"time": 900.0, "event": "started", "name": "trainer", "pid": 10}
LAST = Commit(20, 0, {}, "")


def beat(name, phase="serve", waiting_for=None, since=990.0, written=NOW, deadline=None):
    role, pid = name.partition("_")[0], {"trainer_0": 11, "orchestrator": 12, "inference": 13, "rl": 9}.get(name, 14)
    log = f"/run/logs/{role}.log"
    return Beat(name, role, pid, "node7", "boot", 1, 5, phase, 3, deadline, since, waiting_for, log, written)


def verdict(beat, state=State.ALIVE, why="is alive", life=Life.RUNNING, for_s=0.0):
    return Verdict(beat.name, state, beat, for_s, life, True, why)


TRAINER = verdict(beat("trainer_0", "wait for batch 12", "orchestrator", since=966.0))
ORCHESTRATOR = verdict(beat("orchestrator", "sample", "inference", since=970.0))
INFERENCE = verdict(beat("inference"))
RL = verdict(beat("rl", "watch over the run"))
ALL = (INFERENCE, ORCHESTRATOR, RL, TRAINER)
RUN = Facts(Path("/run"), NOW, 2.0, ALL, owner=9, events=(STARTED,), settings=Settings(60, 2))


def with_(*changed, **fields):
    """The run, with other verdicts of some."""
    by_name = {v.name: v for v in RUN.verdicts} | {v.name: v for v in changed}
    return diagnose(replace(RUN, verdicts=tuple(by_name.values()), **fields))


def test_a_run_in_which_all_live_is_healthy():
    told = with_()
    assert (told.state, told.problems, told.culprit) == (RunState.RUNNING, (), None)
    assert [p.name for p in told.chain] == ["trainer_0", "orchestrator", "inference"]


@pytest.mark.parametrize("state", [State.SILENT, State.DEAD, State.STUCK, State.STOPPED])
def test_the_end_of_the_chain_is_to_blame(state):
    lost = verdict(INFERENCE.beat, state, "has been silent for 7 s")
    told = with_(lost)
    assert (told.culprit, told.healthy) == ("inference", False)
    assert told.problems[0].text.startswith("inference (pid 13 on node7) has been silent for 7 s")
    assert "/run/logs/inference.log" in told.problems[0].text
    line = chain(told.chain, told.processes)
    assert line.startswith("trainer_0: wait for batch 12 (34 s) <- orchestrator: sample (30 s) <- inference has been")


def test_who_is_waited_for_comes_before_others_that_are_lost_too():
    silent = (verdict(v.beat, State.SILENT, "has been silent for 7 s") for v in (RL, INFERENCE))
    assert [p.culprit for p in with_(*silent).problems] == ["inference", "rl"]


@pytest.mark.parametrize("name", ["trainer_0", "orchestrator", "inference", "rl"])
def test_a_stopped_process_is_named_before_it_counts_as_silent(name):
    before = next(v for v in ALL if v.name == name)
    told = with_(verdict(before.beat, life=Life.STOPPED))
    assert told.culprit == name
    assert "is stopped (SIGSTOP?)" in told.problems[0].text
    assert told.problems[0].hint == f"`kill -CONT {before.beat.pid}` lets it go on"


def test_a_stopped_descendant_without_a_heartbeat_is_named():
    told = with_(halted=(Halted(77, "orchestrator/77", "python -m env_worker", False),))
    assert told.culprit == "orchestrator/77"
    assert "orchestrator/77 (pid 77, python -m env_worker) is stopped" in told.problems[0].text
    held = with_(halted=(Halted(77, "orchestrator/77", "python -m env_worker", True),))
    assert held.healthy and "debugger" in held.notes[0]


def test_a_phase_that_lasts_longer_than_it_may_is_stuck_if_nothing_moves():
    late = beat("trainer_0", "wait for batch 12", "orchestrator", since=300.0, deadline=600.0)
    told = with_(verdict(late, for_s=6.0), watched_s=6.0)
    assert told.culprit == "trainer_0"
    assert "is stuck: 700 s in one phase, where 600 s are the limit" in told.problems[0].text
    assert with_(verdict(late, for_s=0.0), watched_s=6.0).healthy, "progress while watched"
    assert with_(verdict(replace(late, phase_deadline_s=None), for_s=6.0), watched_s=6.0).healthy


def test_who_waits_for_each_other_is_a_ring_and_ends():
    ring = verdict(beat("orchestrator", "wait for version 12", "trainer"))
    told = with_(ring)
    assert [p.name for p in told.chain] == ["trainer_0", "orchestrator"]
    assert chain(told.chain, told.processes).endswith("trainer, which waits in turn")


def test_a_rank_that_is_lost_is_what_others_wait_for():
    ranks = [verdict(beat(f"trainer_{n}", "step 3")) for n in range(2)]
    dead = verdict(replace(beat("trainer_1", "step 3"), pid=99), State.DEAD, "is gone")
    told = diagnose(replace(RUN, verdicts=(ranks[0], dead, verdict(beat("orchestrator", "ship", "trainer")))))
    assert [p.name for p in told.chain] == ["orchestrator", "trainer_1"]
    assert told.culprit == "trainer_1"


def test_a_peer_that_never_spoke_is_missed():
    told = diagnose(replace(RUN, verdicts=(TRAINER,)))
    assert told.problems[0].text == "orchestrator is waited for and has never said anything"
    by_hand = diagnose(replace(RUN, verdicts=(TRAINER, ORCHESTRATOR)))
    assert by_hand.healthy, "a server by hand may have no heartbeat"
    assert chain(by_hand.chain, by_hand.processes).endswith("<- inference, which leaves no heartbeat")


ENDED = tuple(verdict(replace(v.beat, phase="ended"), State.ENDED, "has ended", Life.GONE) for v in ALL)


def test_a_finished_run_is_healthy_and_so_is_one_that_was_told_to_stop():
    done = {"time": 999.0, "event": "finished", "name": "rl"}
    told = diagnose(replace(RUN, verdicts=ENDED, owner=None, events=(STARTED, done)))
    assert (told.state, told.healthy, told.chain) == (RunState.FINISHED, True, ())
    killed = verdict(INFERENCE.beat, State.DEAD, "is gone", Life.GONE)
    told = diagnose(replace(RUN, verdicts=(killed, *ENDED[1:]), owner=None, events=(STARTED, done)))
    assert told.healthy and told.notes == ("inference (pid 13 on node7) left no last word when the run was over",)
    stopped = diagnose(replace(RUN, owner=None, events=(STARTED, done | {"detail": "stopped by SIGTERM"})))
    assert (stopped.state, stopped.healthy) == (RunState.STOPPED, True)


def test_a_run_by_hand_is_over_when_all_have_ended():
    assert diagnose(replace(RUN, verdicts=ENDED, owner=None, events=())).state is RunState.FINISHED


def test_a_failed_run_tells_who_why_and_how_to_go_on():
    failed = {"time": 999.0, "event": "failed", "name": "trainer", "role": "trainer", "code": -9,
              "detail": "was killed by SIGKILL"}  # fmt: skip
    facts = replace(RUN, verdicts=ENDED, owner=None, events=(STARTED, failed), checkpoints=(LAST,))
    told = diagnose(facts)
    assert (told.state, told.culprit) == (RunState.FAILED, "trainer")
    assert told.problems[0].text == "trainer was killed by SIGKILL; log /run/logs/trainer.log"
    assert "checkpoint 20" in told.problems[0].hint and "--ckpt.resume-step -1" in told.problems[0].hint
    said = diagnose(replace(facts, errors={"trainer": "the loss is not finite"}))
    assert said.problems[0].text.startswith("trainer was killed by SIGKILL: the loss is not finite; log")


def test_a_run_that_was_resumed_after_its_failure_runs():
    failed = {"time": 950.0, "event": "failed", "name": "trainer", "code": 1}
    assert with_(events=(STARTED, failed, STARTED)).state is RunState.RUNNING


def test_a_run_that_was_killed_as_a_whole_is_dead():
    gone = tuple(verdict(v.beat, State.DEAD, "is gone", Life.GONE) for v in ALL)
    told = diagnose(replace(RUN, verdicts=gone, owner=None))
    assert (told.state, told.culprit) == (RunState.DEAD, "inference")
    assert "without a last word" in told.problems[0].text and told.problems[0].hint is None
    told = diagnose(replace(RUN, verdicts=gone, owner=None, errors={"orchestrator": "no route"}))
    assert told.problems[0].text == "orchestrator has failed: no route"


def test_no_room_is_a_problem_and_so_is_no_process():
    disk = Disk(free=2 * 10**9, total=10**10, used={}, version=10**9, checkpoint=3 * 10**9)
    assert with_(disk=disk).healthy, "without checkpoints a version is all that is written"
    told = with_(disk=disk, settings=Settings(60, 2, "checkpoints"))
    assert told.problems[0].text == "the disk has 2.0 GB left, and the next version and checkpoint need 4.0 GB"
    assert diagnose(Facts(Path("/run"))).state is RunState.QUIET


def test_what_is_worth_knowing():
    again = {"time": 940.0, "event": "restarted", "name": "orchestrator", "detail": "was killed by SIGKILL"}
    told = with_(
        events=(STARTED, again, again | {"time": 970.0}),
        broken={"step_30.tmp": "is not a name of a checkpoint", "step_30": "was not finished: COMMITTED is missing"},
        resume=Resume(20, 1),
    )
    assert told.healthy
    assert told.notes == (
        "checkpoint step_30 is being written, or was not finished",
        "checkpoint step_30.tmp does not count: is not a name of a checkpoint",
        "branch 1 began at step 20",
        "orchestrator was started again 2 times; the last 30 s ago: was killed by SIGKILL",
    )


def test_json_says_the_same():
    told = as_json(with_(verdict(INFERENCE.beat, State.SILENT, "has been silent"), trained={"step": 11},
                         shipped={"step": 12, "policy/version": 11.0, "staleness/max": 1}, version=12))  # fmt: skip
    assert (told["state"], told["healthy"], told["culprit"]) == ("running", False, "inference")
    assert told["chain"] == ["trainer_0", "orchestrator", "inference"]
    assert told["steps"] == {"trained": 12, "shipped": 13, "max_steps": 60, "published": 12, "sampled_from": 11.0,
                             "staleness": 1, "async_level": 2}  # fmt: skip


def test_a_thousand_ranks_fit_on_a_screen():
    ranks = [verdict(replace(beat(f"trainer_{n}", "step 3"), pid=100 + n)) for n in range(1000)]
    ranks[700] = replace(ranks[700], state=State.SILENT, why="has been silent for 7 s")
    console = Console(file=io.StringIO(), width=160, markup=False)
    show(diagnose(replace(RUN, verdicts=(*ranks, RL))), console)
    shown = console.file.getvalue()
    assert "trainer_3" in shown and "trainer_700" in shown and "trainer_500" not in shown
    assert "995 more of trainer" in shown
    assert len(shown.splitlines()) < 20


def test_watching_goes_on_while_somebody_says_nothing():
    first = {v.name: v.beat for v in ALL}
    later = [verdict(replace(v.beat, beat=6)) for v in ALL]
    assert is_settled(first, later)
    assert not is_settled(first, [*later[1:], INFERENCE])
    assert is_settled(first, [*later[1:], verdict(INFERENCE.beat, State.DEAD)])
    assert is_settled(first, [*later[1:], verdict(INFERENCE.beat, life=Life.STOPPED)])
    late = replace(TRAINER.beat, beat=6, phase_deadline_s=10.0)
    assert not is_settled(first, [*later[:-1], verdict(late)]), "perhaps stuck: look whether anything moves"
