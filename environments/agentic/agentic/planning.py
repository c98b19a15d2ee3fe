"""The planning environment: tools that act in a warehouse, one call a turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import verifiers as vf

from agentic.warehouse import (
    ActionError,
    Situation,
    Step,
    Warehouse,
    act,
    describe,
    make_warehouse,
    num_delivered,
    question,
)

from .environment_tools.prompts import ERROR, describe_error, make_dataset

_SITUATION = "agentic_situation"
_LAST_TURN = "agentic_last_turn"
_ACTIONS = "agentic_actions"
_MISTAKES = "agentic_mistakes"


@dataclass(frozen=True)
class Task:
    """A warehouse, its situation at the start, and a plan."""

    world: Warehouse
    start: Situation
    plan: Sequence[Step]


def make_tasks(seed: int, part: str, count: int, min_actions: int, max_actions: int) -> list[Task]:
    """Make tasks, the same for the same seed.

    Raises:
        ValueError: no warehouse needs so few or so many actions.
    """
    source = Random(f"agentic planning {part} {seed}")
    return [Task(*make_warehouse(source, min_actions, max_actions)) for _ in range(count)]


class PlanningEnv(vf.StatefulToolEnv):
    """Tools `look`, `go`, `take`, `drop` and `unlock`. The rollout ends when all parcels are delivered.

    Args:
        train: tasks for training.
        evaluation: tasks for evaluation.
        system_prompt: the system message; "" for none.
        max_turns: maximum number of replies.
    """

    def __init__(self, train: Sequence[Task], evaluation: Sequence[Task], system_prompt: str, max_turns: int) -> None:
        self.tasks = [*train, *evaluation]
        super().__init__(
            max_turns=max_turns,
            error_formatter=describe_error,
            dataset=_dataset(train, system_prompt, 0),
            eval_dataset=_dataset(evaluation, system_prompt, len(train)),
            rubric=vf.Rubric(
                funcs=[self.delivered, self.solved, self.num_actions, self.mistakes], weights=[1.0, 0.0, 0.0, 0.0]
            ),
        )
        for tool in (self.look, self.go, self.take, self.drop, self.unlock):
            self.add_tool(tool, args_to_skip=["state"])

    async def look(self, state: Any) -> str:
        """See where you are, which doors there are, and what lies here."""
        return self._act(state, None)

    async def go(self, room: str, state: Any) -> str:
        """Go through a door.

        Args:
            room: the room behind it.
        """
        return self._act(state, "go", room)

    async def take(self, thing: str, state: Any) -> str:
        """Take a thing that lies here.

        Args:
            thing: its name.
        """
        return self._act(state, "take", thing)

    async def drop(self, state: Any) -> str:
        """Put down what you carry."""
        return self._act(state, "drop")

    async def unlock(self, state: Any) -> str:
        """Unlock the locked door of this room with the key that you carry."""
        return self._act(state, "unlock")

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        """Act, and end the rollout if nothing is left to do; called by verifiers."""
        results = await super().env_response(messages, state, **options)
        if self.delivered(state) == 1:
            state["final_env_response"] = results
        return results

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: Any, **_: Any
    ) -> dict[str, Any]:
        """Give a tool its rollout; called by verifiers."""
        return {**tool_args, "state": state}

    def delivered(self, state: Any) -> float:
        """The share of the parcels that lie in their rooms."""
        task = self._task(state)
        return num_delivered(task.world, state.get(_SITUATION, task.start)) / len(task.world.targets)

    def solved(self, state: Any) -> float:
        """1 if all parcels are delivered."""
        return float(self.delivered(state) == 1)

    def num_actions(self, state: Any) -> float:
        """Number of actions that were possible, without looking."""
        return float(state.get(_ACTIONS, 0))

    def mistakes(self, state: Any) -> float:
        """Number of actions that were not possible."""
        return float(state.get(_MISTAKES, 0))

    def _task(self, state: Any) -> Task:
        return self.tasks[state["info"]["number"]]

    def _act(self, state: Any, action: str | None, argument: Any = "") -> str:
        turn = len(state["trajectory"])
        if state.get(_LAST_TURN) == turn:
            return f"{ERROR}one call in each reply; this one was ignored"
        state[_LAST_TURN] = turn
        task = self._task(state)
        now = state.get(_SITUATION, task.start)
        if action is not None:
            try:
                now = state[_SITUATION] = act(task.world, now, action, str(argument))
            except ActionError as error:
                state[_MISTAKES] = state.get(_MISTAKES, 0) + 1
                return f"{ERROR}{error}"
            state[_ACTIONS] = state.get(_ACTIONS, 0) + 1
        return describe(task.world, now)


def _dataset(tasks: Sequence[Task], system_prompt: str, first: int) -> Any:
    rows = ((question(task.world, task.start), f"{len(task.plan)} actions") for task in tasks)
    return make_dataset(rows, system_prompt, first)
