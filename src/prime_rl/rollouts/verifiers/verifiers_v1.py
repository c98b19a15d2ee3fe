"""Environments of the verifiers v1 API, as in both verifiers 0.3.2.dev22 and 0.4.0.

Our `InterceptionClient` answers the calls of verifiers' interception server. Verifiers sends the id of the trace as the
session id, which selects the recorder. The turns that the recorder saw are trained on, with its token ids,
log-probabilities and versions, not the content of the traces. A failed trace fails its group. The rollouts of several
trainable agents of one episode are joined, and each agent is credited with its own reward.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import verifiers.v1 as vf
from verifiers.v1.clients import Client
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.env import Env
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, ToolCall, Usage
from verifiers.v1.utils.loaders import default_harness_id, harness_class, load_environment, resolve_env_config

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.types import Conversation, Credit, Rollout
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import PromptTooLong
from prime_rl.rollouts.environment_backend import EnvironmentBackend, load_rewards, score_trace
from prime_rl.rollouts.group_attempts import (
    Attempt,
    EnvironmentFailed,
    GroupAttempts,
    SampleTooLong,
    UnsupportedEnvironment,
    as_number,
    config_errors,
    contain_failures,
)
from prime_rl.rollouts.recorder import Mask, Recorder, policy_call
from prime_rl.rollouts.rendering.messages import Reply, normalise
from prime_rl.rollouts.verifiers.v1_harnesses import CONTEXT_OVERFLOW, HARNESS_ID, ChatHarnessConfig, shell_config
from prime_rl.rollouts.verifiers.v1_sandbox_runtime import SandboxRuntimeConfig, shared_sandbox
from prime_rl.rollouts.verifiers.v1_sandbox_runtime import install as install_sandbox_runtime

_INFRASTRUCTURE = ("SandboxError", "TunnelError", "InterceptionError", "ToolsetError")
"""Types of errors for which a retry may succeed."""

_MODEL = vf.ModelContext(
    model="policy", client=vf.TrainClientConfig(base_url="http://policy.invalid", api_key_var="PRIME_RL_NO_KEY")
)
"""A placeholder for the model of the agents. The client of this configuration is replaced, so nothing is sent."""


@dataclass(frozen=True, slots=True)
class TraceClient:
    """The recorder and the sampling parameters of one trace.

    Attributes:
        recorder: records the model calls.
        sampling: vLLM sampling parameters.
        answers: verifiers' messages and our replies.
    """

    recorder: Recorder
    sampling: Mapping[str, Any]
    answers: list[tuple[AssistantMessage, Reply]] = field(default_factory=list)

    def trained(self, trace: Any) -> dict[Reply, Mask]:
        """Return the replies in the trace, without those that verifiers rejected or a hook rewrote."""
        kept = {id(node.message) for node in trace.nodes}
        return {reply: True for message, reply in self.answers if id(message) in kept}


class InterceptionClient(Client):
    """Answers the model calls of all running traces.

    Attributes:
        traces: clients by the id of the trace.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        """Call `warn` with a topic and a warning about ignored parameters."""
        self.traces: dict[str, TraceClient] = {}
        self._warn = warn

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sample one reply; ProviderError if it fails. The body contains the parameters of the agent's sampling."""
        trace = self.traces.get(session_id or "")
        if trace is None or not isinstance(dialect, ChatDialect):
            raise ProviderError("only chat completions of a running rollout are supported", status_code=400)
        try:
            reply = await policy_call(trace.recorder, body, trace.sampling, self._warn)
        except (PromptTooLong, InferenceError, InferenceServerLost, ValueError) as error:
            prefix = f"{CONTEXT_OVERFLOW}: " if isinstance(error, PromptTooLong) else ""
            raise ProviderError(f"{prefix}{error}", status_code=400) from error  # 400: no retry, the group has failed
        response = _response(str(body.get("model", "")), reply)
        trace.answers.append((response.message, reply))
        return response

    async def relay(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a request for a stream; called by verifiers."""
        raise ProviderError("stream is not supported", status_code=400)


def _response(model: str, reply: Reply) -> Response:
    calls = [
        ToolCall(id=call_id, name=call.name, arguments=call.arguments)
        for call_id, call in zip(reply.call_ids, reply.parsed.calls, strict=True)
    ]
    message = AssistantMessage(
        content=reply.parsed.content, reasoning_content=reply.parsed.reasoning, tool_calls=calls or None
    )
    usage = Usage(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
    raw = reply.chat_completion("chatcmpl", model)  # the format that harnesses read
    response = Response(
        id="", created=raw["created"], model=model, message=message, finish_reason=reply.finish_reason, usage=usage
    )
    response.raw = raw
    return response


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


class TasksetEnvironment(EnvironmentBackend):
    """One v1 taskset. Its servers run from the first group until the process exits.

    A taskset has no splits, so `split` does not select tasks. An evaluation selects them by other arguments.
    """

    def _load(self) -> None:
        config = self.config
        if not hasattr(sys.modules[self.module], "__all__"):  # by which verifiers finds a taskset
            raise ConfigError(
                f"environment {config.id!r} defines no load_environment(); write `def load_environment(...)` that "
                "returns an environment of verifiers, or, for a v1 taskset, name its class in `__all__`"
            )
        settings = dict(config.args)
        if not isinstance(given := settings.pop("env", {}), dict):
            raise ConfigError(f"env.args.env = {given!r} of environment {config.id!r} is not a table of keys")
        env = dict(given)
        limit = env.pop("num_tasks", None)
        problem = (
            f"environment {config.id!r} with env.args = {config.args} does not load, neither by load_environment() "
            "nor as a taskset"
        )
        with config_errors(problem):
            env_config = _env_config(self.module, settings, env, config.runtime)
        with config_errors(f"environment {config.id!r}"):
            self._check_shells(env_config)
        with config_errors(problem):
            self._env: Env = load_environment(env_config)
            taskset = self._env.taskset
            if limit is None and not getattr(taskset, "bounded", not taskset.INFINITE):
                raise ConfigError(f"taskset {config.id!r} is infinite; set env.args.env.num_tasks")
            self._tasks = list(islice(taskset, limit))
            self._check_tasks(env_config)
        if not self._tasks:
            raise ConfigError(f"taskset {config.id!r} has no tasks; check env.args")
        self._added_rewards = load_rewards(config.rewards, config.id)
        self._client = InterceptionClient(self.warn)
        self._ready: asyncio.Future[None] | None = None
        self._server_task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def prompt_tokens(self, example: int) -> int:
        """Return the length of a task's prompt in tokens, without additions of the harness; 0 without a prompt."""
        data = self._tasks[example].data
        if data.prompt is None:
            return 0
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
        return self._count_tokens([*system, *prompt])

    def _row(self, example: int) -> Any:
        return self._tasks[example].data

    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        await self._serve()

        async def attempt(this: Attempt) -> list[AgentRollout]:
            clients: dict[str, TraceClient] = {}

            def open_trace(trace: Any) -> None:
                recorder = self._recorder(this, seq_len, len(clients))
                clients[trace.id] = self._client.traces[trace.id] = TraceClient(recorder, sampling)

            async with this.clock:
                with contain_failures():
                    try:
                        episode = await self._env.run_episode(self._tasks[example], _MODEL, on_trace=open_trace)
                    finally:
                        for trace in clients:
                            del self._client.traces[trace]
                    return [await self._agent(trace, clients[trace.id]) for trace in _trained(episode, clients)]

        return join_episodes(await group.run(attempt))

    async def _agent(self, trace: Any, client: TraceClient) -> AgentRollout:
        """Return what one trainable agent did, with the rewards that the configuration adds."""
        if any(getattr(node, "advantages", None) is not None for node in trace.nodes):
            raise UnsupportedEnvironment(
                "it sets `advantages` of messages, which would be ignored; record rewards, and set "
                "orchestrator.advantage"
            )
        rollout = _rollout(trace, client)
        added, values = await score_trace(self._added_rewards, trace, self.config.reward_errors == "zero", self.warn)
        if clash := rollout.metrics.keys() & values.keys():
            raise UnsupportedEnvironment(f"it has its own metric {min(clash)!r}; set env.rewards.name")
        weights = {name: reward.weight for name, reward in trace.rewards.items() if reward is not None}
        weights |= {function.__name__: weight for function, weight in self._added_rewards}
        reward, metrics = rollout.reward + added, {**rollout.metrics, **values}
        rollout = replace(rollout, reward=reward, metrics=metrics, weights=weights)
        return AgentRollout(trace.agent.name, getattr(trace.task, "hash", None) or "", rollout)

    async def _serve(self) -> None:
        """Start the environment's servers if they are not running; EnvironmentFailed if that fails."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            # A new context: the servers are for all groups, not only for the one that starts them.
            self._server_task = asyncio.create_task(self._serve_forever(self._ready), context=Context())
        await asyncio.shield(self._ready)

    async def _serve_forever(self, ready: "asyncio.Future[None]") -> None:
        try:
            async with self._env.serving():
                # The server looks up clients here before it creates one, so it uses ours.
                self._env._interception.clients[_MODEL.client.model_dump_json()] = self._client
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # foreign code may raise anything
            if ready.done():
                raise
            self._ready = None  # the next group retries
            reason = summarize_exception(error, full=True)
            ready.set_exception(EnvironmentFailed(f"its servers did not start: {reason}"))

    def _check_shells(self, env: Any) -> None:
        """Check that agents that run the model's code do so in a sandbox, in a container, or with permission.

        Raises:
            ConfigError: this machine cannot isolate code, or an agent would run it here without isolation.
        """
        config, default = self.config, default_harness_id(self.module)
        on_this_machine, in_sandbox = list[tuple[str, str]](), False
        for role, agent in env:
            if not isinstance(agent, vf.AgentConfig):
                continue
            if agent.model is not None and agent.client is None:
                self.warn(
                    f"model of {role}",
                    f"args.env.{role}.model = {agent.model!r} has no effect: without a client of its own the policy "
                    "of the run answers",
                )
            name = default if agent.harness is None else str(agent.harness.id)
            harness = harness_class(name)
            if isinstance(agent.runtime, SandboxRuntimeConfig):
                in_sandbox |= harness.EXECUTES_CODE
                if harness.NEEDS_CONTAINER:
                    raise ConfigError(
                        f"agent {role!r} of environment {config.id!r} (harness {name!r}) needs a container, which the "
                        f'sandbox is not; name one, such as args.env.{role}.runtime.type = "docker"'
                    )
            elif isinstance(agent.runtime, vf.SubprocessConfig) and harness.EXECUTES_CODE:
                on_this_machine.append((role, name))
        if in_sandbox:
            shared_sandbox.check()
        if not on_this_machine and config.runtime == "subprocess":
            self.warn("runtime", "runtime = 'subprocess' has no effect: none of its agents runs programs")
        for role, name in on_this_machine:
            risk = "runs the model's code on this machine, with your rights and without isolation"
            if config.runtime != "subprocess":
                raise ConfigError(
                    f"agent {role!r} of environment {config.id!r} (harness {name!r}) {risk}; remove "
                    f'args.env.{role}.runtime for the sandbox, or allow it with runtime = "subprocess" next to the id'
                )
            self.warn(f"runtime of {role}", f'agent {role!r} (harness {name!r}) {risk} (runtime = "subprocess")')

    def _check_tasks(self, env: Any) -> None:
        """Raise ConfigError for tasks that need a container if an agent is in the sandbox, where each would fail."""
        agents = [agent for _, agent in env if isinstance(agent, vf.AgentConfig)]
        if not any(isinstance(agent.runtime, SandboxRuntimeConfig) for agent in agents):
            return
        hint = 'and the sandbox is none; name one, such as args.env.agent.runtime.type = "docker"'
        for task in self._tasks:
            if (image := getattr(task.data, "image", None)) is not None:
                raise ConfigError(
                    f"task {task.data.idx!r} of {self.config.id!r} needs the container image {image!r}, {hint}"
                )
        for task in {type(task): task for task in self._tasks}.values():
            for toolset in type(task).toolsets(task.config):
                if getattr(toolset.config, "colocated", False):
                    name = type(toolset).__name__
                    raise ConfigError(
                        f"the tool server {name} of {self.config.id!r} runs in the agent's container, {hint}"
                    )


def _env_config(taskset: str, settings: dict[str, Any], env: dict[str, Any], runtime: str) -> Any:
    """Return the configuration of a v1 environment from the settings of the taskset and of the environment.

    By default an agent runs in the sandbox of this machine, and in our chat harness if the taskset has none. The
    defaults of verifiers are a cloud and a shell; its `null` harness is the same chat at a higher cost. Its `bash`
    harness needs a network, so in the sandbox our `ShellHarness` takes its place.
    """
    install_sandbox_runtime()
    own = {**env.get("taskset", {}), **settings, "id": taskset}
    config = resolve_env_config({"interception": {"type": "server"}, **env, "taskset": own})
    has_own_harness = default_harness_id(taskset) != "bash"
    agents = {}
    for role, agent in config:
        if isinstance(agent, vf.AgentConfig):
            changes: dict[str, Any] = {}
            if isinstance(agent.runtime, vf.PrimeConfig) and "runtime" not in env.get(role, {}):
                changes["runtime"] = vf.SubprocessConfig() if runtime == "subprocess" else SandboxRuntimeConfig()
            is_chat = not has_own_harness if agent.harness is None else agent.harness.id == "null"
            is_bash = agent.harness is not None and agent.harness.id == "bash"
            if is_chat and "harness" not in env.get(role, {}):
                changes["harness"] = ChatHarnessConfig(id=HARNESS_ID)
            elif is_bash and isinstance(changes.get("runtime"), SandboxRuntimeConfig):
                changes["harness"] = shell_config(agent.harness)
            agents[role] = agent.model_copy(update=changes)
    return config.model_copy(update=agents)


def _trained(episode: Any, clients: Mapping[str, TraceClient]) -> list[Any]:
    """Return the traces of a finished episode to train on; raises the same as `run_group`."""
    recorders = [client.recorder for client in clients.values()]
    for recorder in recorders:
        if recorder.server_error is not None:
            raise recorder.server_error
    too_long = any(recorder.prompt_too_long for recorder in recorders)
    if not episode.ok and not too_long:
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        message = "; ".join(f"{error.type}: {' '.join(error.message.split())[:300]}" for error in errors)
        raise EnvironmentFailed(message, any(error.type in _INFRASTRUCTURE for error in errors))
    started = {trace: number for number, trace in enumerate(clients)}  # episode.traces are in order of their ends
    traces = [trace for trace in episode.traces if trace.agent.trainable and clients[trace.id].trained(trace)]
    traces.sort(key=lambda trace: started[trace.id])
    if too_long and not (episode.ok and traces):
        raise SampleTooLong("a prompt does not fit into seq_len")
    if not traces:
        raise EnvironmentFailed("an episode has no trainable agent with replies")
    return traces


def _rollout(trace: Any, client: TraceClient) -> Rollout:
    trained = client.trained(trace)
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {"num_turns": len(trained), **scores, **trace.metrics}
    return client.recorder.rollout(
        trained,
        normalise(trace.messages),
        reward=as_number("the reward", trace.reward),
        metrics={name: as_number(f"metric {name}", value) for name, value in metrics.items()},
        is_truncated=client.recorder.prompt_too_long,
    )


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
    text = tuple((f"{role} ({agent.name})", content) for agent in agents for role, content in agent.rollout.text)
    credits = tuple(
        Credit(agent.name, agent.rollout.reward, context=agent.task, is_truncated=agent.rollout.is_truncated)
        for agent in agents
    )
    conversations = [rollout for rollout in rollouts if isinstance(rollout, Conversation)]
    if not conversations:
        return Rollout(samples, reward, _metrics(agents), is_truncated, text, credits=credits, weights=weights)
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
        credits=credits, weights=weights,
    )  # fmt: skip


def _metrics(agents: Sequence[AgentRollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for agent in agents:
        for name, value in {"reward": agent.rollout.reward, **agent.rollout.metrics}.items():
            values.setdefault(f"{agent.name}/{name}", []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}
