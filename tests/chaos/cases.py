"""Where processes are killed: the points of the protocols, and cases drawn from a seed.

A case is one fault, or two if the second strikes while the run recovers from the first. All points are drawn once
before one is drawn again.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

STEPS = 48
"""Steps of each run: enough to reach the points of several cases, and for the reward to converge."""
INTERVAL = 2
"""Steps between two checkpoints."""
BATCH = r"rollouts/\.tmp-step_\d+-\d+"
VERSION = r"weights/\.tmp-step_\d+-\d+"
CHECKPOINT = r"checkpoints/step_\d+"


@dataclass(frozen=True, slots=True)
class Fault:
    """One kill; the fields are those of `hook/chaos_hook.py`.

    Attributes:
        process: the process that performs the operation.
        operation: mkdir, create, write, fsync, rename or call.
        where: regular expression of the path within the run directory, or name of the call.
        moment: before, half or after it.
        victim: the process that is killed; `self` is `process`.
        count: at which occurrence of the operation.
        after_resume: armed as soon as the run has started to roll back to a checkpoint.
    """

    process: str
    operation: str
    where: str
    moment: str
    victim: str = "self"
    count: int = 1
    after_resume: bool = False

    @property
    def killed(self) -> str:
        """The process that is killed."""
        return self.process if self.victim == "self" else self.victim

    def armed(self, number: int) -> dict[str, Any]:
        """The fault in the form that the hook reads."""
        return {"id": number, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Point:
    """A named point of a protocol.

    Attributes:
        name: of the point.
        fault: the kill there.
        first: a kill that makes the run reach the point.
        needs: a requirement on the run, one of `_NEEDS`.
    """

    name: str
    fault: Fault
    first: Fault | None = None
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One case of the campaign."""

    number: int
    name: str
    faults: tuple[Fault, ...]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run with several consecutive cases.

    Attributes:
        cases: in order.
        engine: `contract`, or `real` for vLLM.
        restarts: `rl` restarts killed processes; otherwise it exits and is resumed with `--ckpt.resume-step -1`.
        async_level: the bound.
        ranks: of the trainer.
        filtered: groups without an advantage are dropped.
        keep_last: number of checkpoints to keep; None keeps all.
        save_async: checkpoints are written during training.
    """

    cases: tuple[Case, ...]
    engine: str = "contract"
    restarts: bool = False
    async_level: int = 2
    ranks: int = 1
    filtered: bool = False
    keep_last: int | None = None
    save_async: bool = False


def _points(process: str, operation: str, where: str, moments: str, name: str, **more: Any) -> Iterator[Point]:
    victim, needs = more.pop("victim", "self"), more.pop("needs", "")
    for moment in moments.split():
        killed = "" if victim == "self" else f", {victim} killed"
        fault = Fault(process, operation, where, moment, victim, **more)
        yield Point(f"{process}: {moment} {name}{killed}", fault, needs=needs)


def _orchestrator() -> Iterator[Point]:
    of = "orchestrator"
    yield from _points(of, "mkdir", BATCH, "before after", "temporary directory of a batch")
    yield from _points(of, "create", rf"{BATCH}/manifest\.json", "before", "manifest of a batch")
    yield from _points(of, "fsync", rf"{BATCH}/manifest\.json", "after", "sync of a batch's manifest")
    yield from _points(of, "rename", r"rollouts/step_\d+", "before after", "rename of a batch")
    yield from _points(of, "write", r"ledger/branch_\d+\.jsonl", "before half after", "write to the ledger", count=3)
    yield from _points(of, "create", r"spool/group_\d+\.msgpack", "before", "file of a spooled group", count=5)
    yield from _points(of, "mkdir", rf"{CHECKPOINT}/\.tmp-orchestrator", "after", "directory of its checkpoint")
    yield from _points(
        of, "create", rf"{CHECKPOINT}/\.tmp-orchestrator/manifest\.json", "before", "manifest of its checkpoint"
    )
    yield from _points(of, "rename", rf"{CHECKPOINT}/orchestrator", "before after", "rename of its checkpoint")
    yield from _points(of, "call", r"client\.stage", "before after", "staging of a version")
    yield from _points(of, "call", r"client\.switch", "before after", "switch to a version")


def _trainer() -> Iterator[Point]:
    of = "rank0"
    committed = rf"{CHECKPOINT}/COMMITTED"
    yield from _points(of, "mkdir", VERSION, "after", "temporary directory of a version")
    yield from _points(of, "create", rf"{VERSION}/manifest\.json", "before", "manifest of a version")
    yield from _points(of, "fsync", rf"{VERSION}/manifest\.json", "after", "sync of a version's manifest")
    yield from _points(of, "rename", r"weights/step_\d+", "before after", "rename of a version")
    yield from _points(of, "create", rf"{CHECKPOINT}/\.tmp-trainer/__0_0\.distcp", "before", "shard of a checkpoint")
    yield from _points(of, "fsync", rf"{CHECKPOINT}/\.tmp-trainer/__0_0\.distcp", "after", "sync of a shard")
    yield from _points(
        of, "create", rf"{CHECKPOINT}/\.tmp-trainer/manifest\.json", "before", "manifest of a checkpoint"
    )
    yield from _points(of, "rename", rf"{CHECKPOINT}/trainer", "before after", "rename of a checkpoint")
    yield from _points(of, "rename", committed, "before after", "COMMITTED")
    yield from _points(of, "rename", r"weights/step_\d+", "after", "rename of a version", victim="torchrun")
    yield from _points(of, "rename", committed, "before", "COMMITTED", victim="torchrun")
    yield from _points(
        of, "rename", r"checkpoints/\.deleted-step_\d+", "after", "hiding of an old checkpoint", needs="pruning"
    )
    yield from _points(
        "rank1", "create", rf"{CHECKPOINT}/\.tmp-trainer/__1_0\.distcp", "before", "shard", needs="two ranks"
    )
    yield from _points(
        "rank1", "fsync", rf"{CHECKPOINT}/\.tmp-trainer/__1_0\.distcp", "after", "sync of a shard", needs="two ranks"
    )


def _inference() -> Iterator[Point]:
    of = "inference"
    yield from _points(of, "call", r"server\.generate", "before after", "an answer", count=7)
    yield from _points(of, "call", r"server\.stage", "before after", "staging")
    yield from _points(of, "call", r"server\.switch", "before after", "switch")
    yield from _points("orchestrator", "call", r"client\.switch", "after", "acknowledged switch", victim=of)


def _others() -> Iterator[Point]:
    worker = "worker"
    yield from _points(worker, "call", r"client\.generate", "before after", "a request", count=5)
    yield from _points(worker, "call", r"client\.generate", "after", "a request", count=5, victim="forkserver")
    rl = "rl"
    yield from _points(worker, "call", r"client\.generate", "after", "a request", count=5, victim=rl)
    yield from _points("orchestrator", "rename", r"rollouts/step_\d+", "before after", "rename of a batch", victim=rl)
    yield from _points("rank0", "rename", r"weights/step_\d+", "after", "rename of a version", victim=rl)
    yield from _points("rank0", "rename", rf"{CHECKPOINT}/COMMITTED", "before after", "COMMITTED", victim=rl)


def _recoveries() -> Iterator[Point]:
    """Kills while a run rolls back to a checkpoint."""
    first = Fault("rank0", "rename", r"weights/step_\d+", "after")
    resume = r"checkpoints/RESUME\.json"
    found = [
        *_points("rank0", "rename", r"abandoned/branch_\d+/.*", "before after", "archiving"),
        *_points("rank0", "rename", resume, "before after", "RESUME.json"),
        *_points("orchestrator", "write", r"ledger/branch_\d+\.jsonl", "before half", "first line of the new ledger"),
        *_points("orchestrator", "call", r"client\.switch", "before after", "load of the version rolled back to"),
    ]
    for point in found:
        fault = replace(point.fault, after_resume=point.fault.process == "orchestrator")
        yield replace(point, name=f"recovery, {point.name}", fault=fault, first=first)


POINTS: tuple[Point, ...] = (*_orchestrator(), *_trainer(), *_inference(), *_others(), *_recoveries())


def _real() -> Iterator[Point]:
    """Points that need the real server: in it, and at its admin routes."""
    for victim in ("self", "engine"):
        yield from _points("inference", "call", r"server\.switch", "before after", "switch", victim=victim)
        yield from _points("inference", "call", r"server\.stage", "before", "staging", victim=victim)
    yield from _points("inference", "call", r"server\.switch", "after", "switch", victim="orchestrator")
    yield from _points("inference", "call", r"server\.stage", "before", "staging", victim="orchestrator")
    yield from _points("orchestrator", "call", r"client\.switch", "after", "acknowledged switch", victim="inference")
    yield from _points("orchestrator", "call", r"client\.switch", "after", "acknowledged switch", victim="rank0")


REAL_POINTS = tuple(replace(point, name=f"vLLM, {point.name}", needs="real") for point in _real())

_RESTARTED, _RESUMED = 5, 3
"""Cases of one run; fewer if all processes are started again after each."""
_REAL_SHARE = 10
"""One in this many cases uses the real server."""


@dataclass
class _Deck:
    """Deals points; shuffles again when all are dealt."""

    points: Sequence[Point]
    chance: random.Random
    left: list[Point] = field(default_factory=list)

    def deal(self) -> Point:
        if not self.left:
            self.left = list(self.points)
            self.chance.shuffle(self.left)
        return self.left.pop()


def draw(cases: int, seed: int, only: str = "") -> list[Plan]:
    """Draw a campaign; equal arguments give equal campaigns.

    Args:
        cases: number of cases; one in ten uses the real server.
        seed: seed of points, counts and settings.
        only: draw only points whose name contains this.

    Raises:
        ValueError: there is no such point.
    """
    chance = random.Random(seed)
    points = [point for point in POINTS if only in point.name]
    real_points = [point for point in REAL_POINTS if only in point.name]
    if not points and not real_points:
        raise ValueError(f"no point has {only!r} in its name")
    real = 0 if not real_points else cases // _REAL_SHARE if points else cases
    decks = _Deck(real_points, chance), _Deck(points, chance)
    drawn = [_case(number, decks[number >= real].deal(), chance) for number in range(cases)]
    first = [Plan(tuple(drawn[:real]), engine="real", restarts=True)] if real else []
    return first + _runs(drawn[real:], chance)


def group_into_plans(cases: Sequence[Case], like: Plan) -> list[Plan]:
    """Group cases with equal needs into runs with the settings of `like`, apart from these needs."""
    plans = []
    for needs, own in _NEEDS.items():
        alike = [case for case in cases if case.needs == needs]
        while alike:
            plan = replace(like, **_NEEDS_NOTHING | own)
            few = _RESTARTED if plan.restarts else _RESUMED
            plans.append(replace(plan, cases=tuple(alike[:few])))
            alike = alike[few:]
    return plans


def _case(number: int, point: Point, chance: random.Random) -> Case:
    fault = replace(point.fault, count=chance.randint(1, point.fault.count + 1))
    if point.first is not None:
        return Case(number, point.name, (point.first, replace(fault, count=1)), point.needs)
    return Case(number, point.name, (fault,), point.needs)


_NEEDS_NOTHING: dict[str, Any] = {"engine": "contract", "ranks": 1, "keep_last": None}
_NEEDS: dict[str, dict[str, Any]] = {
    "": {},
    "pruning": {"keep_last": 2},
    "two ranks": {"ranks": 2},
    "real": {"engine": "real"},
}
"""Needs of a case, and the settings that provide them."""


def _runs(cases: Sequence[Case], chance: random.Random) -> list[Plan]:
    """Divide cases among runs; every second run is restarted by `rl`, the others are resumed by the campaign."""
    plans = []
    for needs, own in _NEEDS.items():
        alike = [case for case in cases if case.needs == needs]
        while alike:
            restarts = len(plans) % 2 == 0
            few = _RESTARTED if restarts else _RESUMED
            plan = Plan(
                tuple(alike[:few]),
                restarts=restarts,
                async_level=chance.choice((0, 1, 2)),
                filtered=len(cases) > 2 * (_RESTARTED + _RESUMED) and chance.random() < 0.5,
                save_async=chance.random() < 0.25,
            )
            plans.append(replace(plan, **own))
            alike = alike[few:]
    return plans
