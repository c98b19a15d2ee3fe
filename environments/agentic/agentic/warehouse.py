"""A warehouse: rooms with doors, one of them locked, and parcels that belong in other rooms.

The robot carries one thing at a time, which bounds the length of all plans from below.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from random import Random

Step = tuple[str, str]
"""An action and its argument: ("go", "hall")."""

ROOMS = ("dock", "hall", "store", "office", "vault", "lab")
PARCELS = ("red parcel", "blue parcel", "green parcel")
KEY = "key"
CARRIED = "carried"


class ActionError(ValueError):
    """An action that is not possible now; the text is for the model."""


@dataclass(frozen=True)
class Warehouse:
    """What never changes: doors between rooms, the locked one, and the room of each parcel.

    Attributes:
        doors: room -> rooms behind its doors.
        locked: room whose doors are locked until the key is used beside it.
        targets: parcel -> room in which it belongs.
    """

    doors: dict[str, tuple[str, ...]]
    locked: str
    targets: dict[str, str]


@dataclass(frozen=True)
class Situation:
    """What changes: the robot's room, the room of each thing (or `CARRIED`), and whether the door is open."""

    room: str
    places: tuple[tuple[str, str], ...]
    is_open: bool = False

    @property
    def carried(self) -> str | None:
        """The thing that the robot carries."""
        return next((thing for thing, place in self.places if place == CARRIED), None)

    def things_here(self) -> list[str]:
        """The things that lie in the robot's room."""
        return [thing for thing, place in self.places if place == self.room]

    def move(self, thing: str, place: str) -> "Situation":
        """The situation after a thing has changed its place."""
        places = tuple((name, place if name == thing else old) for name, old in self.places)
        return replace(self, places=places)


def act(world: Warehouse, now: Situation, action: str, argument: str = "") -> Situation:
    """Return the situation after an action: go, take, drop or unlock.

    Raises:
        ActionError: it is not possible.
    """
    if action == "go":
        if argument not in world.doors[now.room]:
            raise ActionError(f"there is no door to {argument[:40]!r} here")
        if argument == world.locked and not now.is_open:
            raise ActionError(f"the door to {argument} is locked")
        return replace(now, room=argument)
    if action == "take":
        if now.carried:
            raise ActionError(f"you carry the {now.carried} already")
        if argument not in now.things_here():
            raise ActionError(f"there is no {argument[:40]!r} here")
        return now.move(argument, CARRIED)
    if action == "drop":
        if not now.carried:
            raise ActionError("you carry nothing")
        return now.move(now.carried, now.room)
    if world.locked not in world.doors[now.room] or now.is_open:
        raise ActionError("there is no locked door here")
    if now.carried != KEY:
        raise ActionError("you need the key")
    return replace(now, is_open=True)


def num_delivered(world: Warehouse, now: Situation) -> int:
    """Count the parcels that lie in their rooms."""
    places = dict(now.places)
    return sum(places[parcel] == room for parcel, room in world.targets.items())


def describe(world: Warehouse, now: Situation) -> str:
    """Return what the robot sees."""
    doors = ", ".join(
        f"{room} (locked)" if room == world.locked and not now.is_open else room for room in world.doors[now.room]
    )
    things = ", ".join(now.things_here()) or "nothing"
    return f"You are in the {now.room}. Doors: {doors}. Here: {things}. You carry: {now.carried or 'nothing'}."


def make_warehouse(source: Random, min_actions: int, max_actions: int) -> tuple[Warehouse, Situation, list[Step]]:
    """Draw a warehouse and a plan for it: no plan has fewer than `min_actions`, this one has at most `max_actions`.

    Raises:
        ValueError: none is found.
    """
    for _ in range(5_000):
        rooms = source.sample(ROOMS, len(ROOMS))
        doors: dict[str, list[str]] = {room: [] for room in rooms}
        for index, room in enumerate(rooms[1:], 1):
            other = rooms[source.randrange(max(0, index - 2), index)]  # long rather than wide
            doors[room].append(other)
            doors[other].append(room)
        locked, others = rooms[-1], rooms[:-1]
        places = [(thing, source.choice(others)) for thing in (KEY, *PARCELS)]
        targets = {parcel: source.choice([room for room in rooms if room != place]) for parcel, place in places[1:]}
        targets[PARCELS[0]] = locked
        world = Warehouse({room: tuple(sorted(behind)) for room, behind in doors.items()}, locked, targets)
        start = Situation(rooms[0], tuple(places))
        if _fewest_actions(world, start) >= min_actions and len(plan := make_plan(world, start)) <= max_actions:
            return world, start, plan
    raise ValueError(f"no warehouse is found that needs between {min_actions} and {max_actions} actions")


def make_plan(world: Warehouse, start: Situation) -> list[Step]:
    """Return a plan that fetches the key and the parcels one after the other, in the best order."""
    places = dict(start.places)
    best: list[Step] = []
    for order in permutations(places):
        plan: list[Step] = []
        room, has_key = start.room, False
        for thing in order:
            if thing == KEY:
                target = world.doors[world.locked][0]
                has_key = True
            elif (target := world.targets[thing]) == world.locked and not has_key:
                break
            plan += [("go", step) for step in _path(world, room, places[thing])] + [("take", thing)]
            plan += [("go", step) for step in _path(world, places[thing], target)]
            plan += [("unlock", ""), ("drop", "")] if thing == KEY else [("drop", "")]
            room = target
        else:
            best = plan if not best or len(plan) < len(best) else best
    return best


def _fewest_actions(world: Warehouse, start: Situation) -> int:
    """Return a lower bound of the length of all plans.

    Only one thing is carried at a time, so the ways with different things are different actions.
    """
    places = dict(start.places)
    with_parcels = sum(2 + len(_path(world, places[parcel], room)) for parcel, room in world.targets.items())
    with_key = 3 + len(_path(world, places[KEY], world.doors[world.locked][0]))
    return with_parcels + with_key


def _path(world: Warehouse, start: str, end: str) -> list[str]:
    """Return the rooms after `start` on the only way to `end`; the locked room is a dead end."""
    ways = [[start]]
    for way in ways:
        if way[-1] == end:
            break
        ways += [[*way, room] for room in world.doors[way[-1]] if room not in way]
    return way[1:]


def question(world: Warehouse, start: Situation) -> str:
    """Return the task in words."""
    orders: Sequence[str] = [f"the {parcel} into the {room}" for parcel, room in world.targets.items()]
    return (
        f"You are a robot in a warehouse. Bring {', '.join(orders)}. You carry one thing at a time. The "
        f"{world.locked} is locked: carry the key to its door and unlock it. Call one tool in each reply.\n"
        f"{describe(world, start)}"
    )
