"""Groups of v1 episodes: their model calls, and their agents as rollouts.

The turns that the recorder saw are trained on, with its token ids, log-probabilities and versions, not the content of
the traces. A failed trace fails its group, and a lost server ends it at once: a remote agent may never report, and the
group runs again on another server. The rollouts of several trainable agents of one episode are joined, and each
agent is credited with its own reward.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prime_rl.core.types import Conversation, Credit, Rollout
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import PromptTooLong
from prime_rl.rollouts.group_attempts import (
    Attempt,
    EnvironmentFailed,
    GroupAttempts,
    SampleTooLong,
    UnsupportedEnvironment,
    as_number,
    contain_failures,
)
from prime_rl.rollouts.policy_call import policy_call
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.messages import Reply, normalise
from prime_rl.rollouts.separate.values import CONTEXT_OVERFLOW


class EpisodeCalls:
    """Answers the model calls of the agents of one episode.

    Attributes:
        recorders: of the agents, by their number.
    """

    def __init__(
        self,
        make_recorder: Callable[[int], Recorder],
        sampling: Mapping[str, Any],
        warn: Callable[[str, str], None],
    ) -> None:
        """Serve one episode with the run's `sampling` parameters; `warn` gets a topic and a warning."""
        self.recorders: dict[int, Recorder] = {}
        self._make_recorder, self._sampling, self._warn = make_recorder, sampling, warn
        self._limit: asyncio.Timeout | None = None

    async def ask(self, agent: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the body of a chat completion of an agent. Raises ValueError if it cannot."""
        if agent not in self.recorders:
            self.recorders[agent] = self._make_recorder(agent)
        recorder = self.recorders[agent]
        try:
            reply = await policy_call(recorder, body, self._sampling, self._warn)
        except PromptTooLong as error:
            raise ValueError(f"This model's {CONTEXT_OVERFLOW} is exceeded: {error}") from error
        except (InferenceError, InferenceServerLost) as error:
            if self._limit is not None:  # the recorder keeps the error
                self._limit.reschedule(0.0)
                self._limit = None
            raise ValueError(str(error)) from error
        return reply.chat_completion(f"{agent}-{recorder.replies.index(reply)}", str(body.get("model", "")))

    def reply(self, name: str) -> Reply:
        """Return the reply with the id of its chat completion."""
        agent, index = map(int, name.split("-"))
        return self.recorders[agent].replies[index]

    async def finish(self, run: "Callable[[EpisodeCalls], Awaitable[Mapping[str, Any]]]") -> Mapping[str, Any]:
        """Return the result of the episode, which is cancelled when the server fails.

        Raises the same as `EnvironmentBackend.run_group` for an episode that is not trained on.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                result = await run(self)
        except TimeoutError:
            if not limit.expired():
                raise
            result = {}
        finally:
            self._limit = None
        for recorder in self.recorders.values():
            if recorder.server_error is not None:
                raise recorder.server_error
        self._check(result)
        return result

    def _check(self, result: Mapping[str, Any]) -> None:
        for warning in result["warnings"]:
            self._warn(*warning)
        too_long = any(recorder.prompt_too_long for recorder in self.recorders.values())
        if result["failure"] is not None and not too_long:
            raise EnvironmentFailed(result["failure"], result["infrastructure"])
        if too_long and (result["failure"] is not None or not result["agents"]):
            raise SampleTooLong("a prompt does not fit into seq_len")
        if not result["agents"]:
            raise EnvironmentFailed(f"an episode has no trainable agent with replies (stopped by {result['stopped']})")

    def rollout(self, agent: Mapping[str, Any]) -> Rollout:
        """Return what one agent did."""
        recorder, trained = self.recorders[agent["agent"]], list(map(self.reply, agent["replies"]))
        metrics = {"num_turns": len(trained), **agent["metrics"]}
        rollout = recorder.rollout(
            dict.fromkeys(trained, True),
            normalise(agent["messages"]),
            reward=as_number("the reward", agent["reward"]),
            metrics={name: as_number(f"metric {name}", value) for name, value in metrics.items()},
            is_truncated=recorder.prompt_too_long,
        )
        return replace(rollout, weights=dict(agent["weights"]))


@dataclass(frozen=True, slots=True)
class AgentRollout:
    """What one agent did in an episode.

    Attributes:
        name: of the agent; an agent that ran several times occurs several times.
        task: identifies what it was given.
        rollout: its conversation, with its reward and its metrics.
    """

    name: str
    task: str
    rollout: Rollout


async def run_episodes(
    group: GroupAttempts,
    make_calls: Callable[[Attempt], EpisodeCalls],
    run: Callable[[EpisodeCalls], Awaitable[Mapping[str, Any]]],
    finish: Callable[[Rollout, Mapping[str, Any]], Awaitable[Rollout]] | None = None,
) -> list[Rollout]:
    """Run a group of episodes.

    Args:
        group: limits and repeats them.
        make_calls: answers the model calls of one.
        run: returns the result of one, as `TasksetAdapter.episode`.
        finish: changes the rollout of an agent, whose result it gets.
    """

    async def attempt(this: Attempt) -> list[AgentRollout]:
        calls, agents = make_calls(this), []
        async with this.clock:
            with contain_failures():
                result = await calls.finish(run)
                for agent in result["agents"]:
                    rollout = calls.rollout(agent)
                    rollout = rollout if finish is None else await finish(rollout, agent)
                    agents.append(AgentRollout(agent["name"], agent["task"], rollout))
        return agents

    return join_episodes(await group.run(attempt))


def add_rewards(
    rollout: Rollout,
    added: float,
    values: Mapping[str, float],
    num_zeros: int,
    functions: Sequence[tuple[Callable[..., Any], float]],
) -> Rollout:
    """Return a rollout with what `score_objects` returns for functions of the configuration, and their weights."""
    check_names_differ(rollout.metrics, values)
    metrics = {**rollout.metrics, **values}
    if num_zeros:
        metrics["reward_errors"] += num_zeros
    weights = {**rollout.weights, **{function.__name__: weight for function, weight in functions}}
    return replace(rollout, reward=rollout.reward + added, metrics=metrics, weights=weights)


def check_names_differ(metrics: Mapping[str, float], values: Mapping[str, float]) -> None:
    """Raise UnsupportedEnvironment if a reward function of the configuration has the name of a metric."""
    if clash := metrics.keys() & values.keys():
        raise UnsupportedEnvironment(f"it has its own metric {min(clash)!r}; set env.rewards.name")


def join_episodes(episodes: Sequence[Sequence[AgentRollout]]) -> list[Rollout]:
    """Return one rollout for each episode of a group; without credits if one agent ran once in each.

    All have credits otherwise: an episode in which only one of several agents ran is compared by agent as well.
    """
    names = {agent.name for agents in episodes for agent in agents}
    if len(names) == 1 and all(len(agents) == 1 for agents in episodes):
        return [agent.rollout for agents in episodes for agent in agents]
    return [join_agents(agents) for agents in episodes]


def join_agents(agents: Sequence[AgentRollout]) -> Rollout:
    """Return the episode as one rollout; a `Conversation` if the rollouts are.

    Its reward is the mean over the agents, its metrics are `<agent>/<metric>`, with the reward among them.
    """
    rollouts = [agent.rollout for agent in agents]
    samples = tuple(
        replace(sample, credits=np.full(len(sample), index, np.int32))
        for index, rollout in enumerate(rollouts)
        for sample in rollout.samples
    )
    reward = float(np.mean([rollout.reward for rollout in rollouts]))
    weights = {f"{agent.name}/{name}": value for agent in agents for name, value in agent.rollout.weights.items()}
    is_truncated = any(rollout.is_truncated for rollout in rollouts)
    counts = Counter[str]()
    for rollout in rollouts:
        counts.update(rollout.sample_counts)
    text = tuple((f"{role} ({agent.name})", content) for agent in agents for role, content in agent.rollout.text)
    credits = tuple(
        Credit(agent.name, agent.rollout.reward, context=agent.task, is_truncated=agent.rollout.is_truncated)
        for agent in agents
    )
    conversations = [rollout for rollout in rollouts if isinstance(rollout, Conversation)]
    if not conversations:
        return Rollout(
            samples, reward, _metrics(agents), is_truncated, text,
            credits=credits, weights=weights, sample_counts=dict(counts),
        )  # fmt: skip
    tools = {repr(tool): tool for conversation in conversations for tool in conversation.tools}
    spans = [conversation.versions for conversation in conversations if conversation.versions is not None]
    return Conversation(
        samples, reward, _metrics(agents), is_truncated, text,
        messages=tuple(
            {**message, "agent": agent.name}
            for agent, conversation in zip(agents, conversations, strict=True)
            for message in conversation.messages
        ),
        tools=tuple(tools.values()),
        completion_tokens=sum(conversation.completion_tokens for conversation in conversations),
        versions=(min(old for old, _ in spans), max(new for _, new in spans)) if spans else None,
        credits=credits, weights=weights, sample_counts=dict(counts),
    )  # fmt: skip


def _metrics(agents: Sequence[AgentRollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for agent in agents:
        for name, value in {"reward": agent.rollout.reward, **agent.rollout.metrics}.items():
            values.setdefault(f"{agent.name}/{name}", []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}
