"""Joins the rollouts of several trainable agents of one episode, each of which is credited with its own reward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prime_rl.core.types import Conversation, Credit, Rollout


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
    is_truncated = any(rollout.is_truncated for rollout in rollouts)
    text = tuple((f"{role} ({agent.name})", content) for agent in agents for role, content in agent.rollout.text)
    credits = tuple(
        Credit(agent.name, agent.rollout.reward, context=agent.task, is_truncated=agent.rollout.is_truncated)
        for agent in agents
    )
    conversations = [rollout for rollout in rollouts if isinstance(rollout, Conversation)]
    if not conversations:
        return Rollout(samples, reward, _metrics(agents), is_truncated, text, credits=credits)
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
        credits=credits,
    )  # fmt: skip


def _metrics(agents: Sequence[AgentRollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for agent in agents:
        for name, value in {"reward": agent.rollout.reward, **agent.rollout.metrics}.items():
            values.setdefault(f"{agent.name}/{name}", []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}
