"""Environments of the verifiers v1 API, from release 0.3.2.dev22 on: in a worker, or in an interpreter of their own.

Our `InterceptionClient` answers the calls of verifiers' interception server.
"""

import asyncio
import builtins
import functools
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, ContextVar
from types import ModuleType
from typing import Any, cast

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.env import Env
from verifiers.v1.utils.loaders import (
    default_harness_id,
    harness_class,
    load_environment,
    resolve_env_config,
    taskset_config_type,
)
from verifiers.v1.utils.retries import run_episode_with_retry

from .agent_runtime import Box, RemoteBox, SandboxRuntimeConfig, add_sandbox
from .interception import (
    Ask,
    CountTokens,
    InterceptionClient,
    OpenTrace,
    adapt_server,
    lengthen_backlog,
    speed_up_defaults,
)
from .v1_harnesses import (
    COMMAND_HARNESS_ID,
    CONNECTIONS,
    FUNCTION_HARNESS_ID,
    HARNESS_ID,
    ChatHarnessConfig,
    CommandHarnessConfig,
    FunctionHarnessConfig,
    ProgramMissing,
    prompt_text,
    shell_config,
)
from .values import (
    INFRASTRUCTURE,
    CallAgent,
    Failed,
    NotANumber,
    Refused,
    Request,
    RequestFailed,
    describe,
    finite_number,
    plain_messages,
)

_MAX_TASKS = 500_000
"""Of a taskset that does not say that it is infinite."""

_MODEL = vf.ModelContext(
    model="policy", client=vf.EvalClientConfig(base_url="http://policy.invalid", api_key_var="PRIME_RL_NO_KEY")
)
"""A placeholder for the model of the agents. Its client is replaced, so nothing is sent; only such a client streams."""


def check_taskset(module: ModuleType) -> None:
    """Raise Refused if a module without `load_environment` names no taskset, as verifiers finds it."""
    if not hasattr(module, "__all__"):
        raise Refused(
            f"environment {module.__name__!r} ({module.__file__}) defines no load_environment(); "
            "write `def load_environment(...)` that returns an environment of verifiers, or, for a v1 taskset, name "
            "its class in `__all__`"
        )


class TasksetAdapter:
    """One v1 taskset. Its servers run from the first episode until the process exits.

    Attributes:
        warnings: topics and texts.
        uses_sandbox: an agent runs programs in it.
        eval_split: a taskset has no splits: an evaluation selects tasks by other arguments.
    """

    eval_split = "none"

    def __init__(
        self,
        taskset: str,
        args: Mapping[str, Any],
        permission: str,
        open_box: Callable[[], Box],
        count_tokens: CountTokens,
        command: Sequence[str] = (),
        call_agent: CallAgent | None = None,
        counts_zero: bool = False,
        install: str = "",
    ) -> None:
        """Load a taskset.

        Args:
            taskset: name of its module.
            args: of the taskset; `env` has those of the environment, and `num_tasks`.
            permission: `env.runtime`.
            open_box: makes the sandbox of an agent.
            count_tokens: answers agents that ask for the length of a prompt.
            command: program of the agents without a `harness`; () if none is given.
            call_agent: calls the user's function that is these agents; None if none is given.
            counts_zero: a failed reward function counts as 0.
            install: how to install the program.

        Raises:
            Refused: it cannot run here. Also what verifiers raises for wrong arguments.
        """
        self.warnings: list[tuple[str, str]] = []
        self.uses_sandbox = False
        self._taskset, self._permission, self._command, self._call_agent = taskset, permission, command, call_agent
        self._counts_zero, self._install = counts_zero, install
        add_sandbox(open_box)
        speed_up_defaults()
        settings = dict(args)
        if not isinstance(given := settings.pop("env", {}), dict):
            raise Refused(f"env.args.env = {given!r} of environment {taskset!r} is not a table of keys")
        env = dict(given)
        limit = env.pop("num_tasks", None)
        config = self._env_config(settings, env)
        self._check_shells(config)
        self.env: Env = load_environment(config)
        tasks = self.env.taskset
        if limit is None and not getattr(tasks, "bounded", not tasks.INFINITE):
            raise Refused(f"taskset {taskset!r} is infinite; set env.args.env.num_tasks")
        self.tasks = list(itertools.islice(tasks, _MAX_TASKS + 1 if limit is None else limit))
        if limit is None and len(self.tasks) > _MAX_TASKS:
            raise Refused(f"taskset {taskset!r} has more than {_MAX_TASKS:,} tasks; set env.args.env.num_tasks")
        self._check_tasks(config)
        self.client = InterceptionClient(count_tokens)
        self._ready: asyncio.Future[None] | None = None
        self._has_replied = False
        self._server_task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    def prompt(self, example: int) -> list[Any]:
        """Return the messages of a task's prompt, without additions of the harness; [] without a prompt."""
        data = self.tasks[example].data
        if data.prompt is None:
            return []
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        return [*system, *([{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt)]

    async def describe(self) -> dict[str, Any]:
        """Return the API, the arguments with their defaults, and the weights of the rewards of the first task."""
        kind = taskset_config_type(self._taskset)
        fields = kind.model_fields.items()
        arguments = {name: repr(each.get_default(call_default_factory=True)) for name, each in fields}
        rewards = self.tasks[0].hooks("reward")
        weights = {each.__name__: float(getattr(each, "_vf_weight", 1.0)) for each in rewards}
        return {"api": "v1", "arguments": arguments, "rewards": weights}

    async def episode(self, example: int, ask: Ask) -> dict[str, Any]:
        """Run one episode; `ask` samples the replies of its agents.

        Returns:
            `failure`, None if it succeeded; `infrastructure`, whether a retry may succeed; `stopped`, by
            what; `warnings`, topics and texts, about failed reward functions; `agents`, the trainable ones
            with replies in the order in which they started: their number `agent`, `name`, `task`, which identifies what
            it was given, ids of the `replies` in the trace, `messages`, `reward`, `metrics`, `weights` of the metrics,
            and the `trace`, an object of verifiers.

        Raises:
            Failed: the environment's servers did not start.
            Refused: it sets what cannot be trained on, or its program is not there.
        """
        await self._serve()
        opened: dict[str, OpenTrace] = {}
        scoring = _Scoring(self._counts_zero)
        _scoring.set(scoring)
        CONNECTIONS.set(self._connections)

        def open_trace(trace: Any) -> None:
            opened[trace.id] = self.client.traces[trace.id] = OpenTrace(len(opened), ask)

        def attempt() -> Awaitable[Any]:
            return self.env.run_episode(self.tasks[example], _MODEL, on_trace=open_trace)

        try:
            episode = await run_episode_with_retry(attempt, self.env.config.retries)
        finally:
            for trace in opened:
                del self.client.traces[trace]
        errors = []
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        failure = "; ".join(f"{error.type}: {' '.join(error.message.split())[:400]}" for error in errors)
        self._has_replied |= any(node.sampled for trace in episode.traces for node in trace.nodes)
        if not self._has_replied and any(error.type == ProgramMissing.__name__ for error in errors):
            raise Refused(f"its program cannot be started; install it {self._install} ({failure})")
        agents = [_agent(trace, opened[trace.id], scoring) for trace in episode.traces if trace.agent.trainable]
        return {
            "failure": None if episode.ok else failure,
            "warnings": scoring.warnings,
            "stopped": ", ".join(sorted({str(trace.stop_condition) for trace in episode.traces})),
            "infrastructure": any(map(_is_infrastructure, errors)),
            # episode.traces are in the order of their ends
            "agents": sorted((agent for agent in agents if agent["replies"]), key=lambda agent: int(agent["agent"])),
        }

    async def _serve(self) -> None:
        """Start the environment's servers if they are not running; Failed if that fails."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            # A new context: the servers are for all groups, not only for the one that starts them.
            self._server_task = asyncio.create_task(self._serve_forever(self._ready), context=Context())
        await asyncio.shield(self._ready)

    async def _serve_forever(self, ready: "asyncio.Future[None]") -> None:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)  # tasks have their limits
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, self.env.serving():
                self._connections = session
                # The server looks up clients here before it creates one, so it uses ours.
                self.env._interception.clients[_MODEL.client.model_dump_json()] = self.client
                lengthen_backlog(self.env._interception)
                adapt_server(self.env._interception.runner.server)
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # foreign code may raise anything
            if ready.done():
                raise
            ready.set_exception(Failed(f"its servers did not start: {describe(error)['message']}"))
        finally:
            self._ready = None  # the next group starts them again
            if not ready.done():
                ready.set_exception(Failed("its servers ended"))

    def _is_full(self, trace: str) -> bool:
        return self.client.traces[trace].is_full

    def _check_shells(self, env: Any) -> None:
        """Check that agents that run the model's code do so in a sandbox, in a container, or with permission."""
        taskset, default = self._taskset, default_harness_id(self._taskset)
        on_this_machine = list[tuple[str, str]]()
        for role, agent in env:
            if not isinstance(agent, vf.AgentConfig):
                continue
            if agent.model is not None and agent.client is None:
                warning = f"args.env.{role}.model = {agent.model!r} has no effect: without a client of its own the "
                self.warnings.append((f"model of {role}", f"{warning}policy of the run answers"))
            name = default if agent.harness is None else str(agent.harness.id)
            harness = harness_class(name)
            if isinstance(agent.runtime, SandboxRuntimeConfig):
                self.uses_sandbox |= bool(harness.EXECUTES_CODE)
                if harness.NEEDS_CONTAINER:
                    raise Refused(
                        f"agent {role!r} of environment {taskset!r} (harness {name!r}) needs a container, which the "
                        f'sandbox is not; name one, such as args.env.{role}.runtime.type = "docker"'
                    )
            elif isinstance(agent.runtime, vf.SubprocessConfig) and harness.EXECUTES_CODE:
                on_this_machine.append((role, name))
        if not on_this_machine and self._permission == "subprocess":
            warning = "runtime = 'subprocess' has no effect: none of its agents runs programs"
            self.warnings.append(("runtime", warning))
        for role, name in on_this_machine:
            risk = "runs the model's code on this machine, with your rights and without isolation"
            if self._permission != "subprocess":
                raise Refused(
                    f"agent {role!r} of environment {taskset!r} (harness {name!r}) {risk}; remove "
                    f'args.env.{role}.runtime for the sandbox, or allow it with runtime = "subprocess" next to the id'
                )
            warning = f'agent {role!r} (harness {name!r}) {risk} (runtime = "subprocess")'
            self.warnings.append((f"runtime of {role}", warning))

    def _check_tasks(self, env: Any) -> None:
        """Raise Refused for tasks that need a container if an agent is in the sandbox, where each would fail."""
        agents = [agent for _, agent in env if isinstance(agent, vf.AgentConfig)]
        if any(isinstance(agent.harness, CommandHarnessConfig) for agent in agents):
            for task in self.tasks:
                try:
                    prompt_text(task.data)
                except ValueError as error:
                    raise Refused(
                        f"task {task.data.idx!r} of {self._taskset!r} cannot use `command`: {error}"
                    ) from None
        if not any(isinstance(agent.runtime, SandboxRuntimeConfig) for agent in agents):
            return
        hint = 'and the sandbox is none; name one, such as args.env.agent.runtime.type = "docker"'
        for task in self.tasks:
            if (image := getattr(task.data, "image", None)) is not None:
                raise Refused(
                    f"task {task.data.idx!r} of {self._taskset!r} needs the container image {image!r}, {hint}"
                )
        for task in {type(task): task for task in self.tasks}.values():
            for toolset in type(task).toolsets(task.config):
                if getattr(toolset.config, "colocated", False):
                    name = type(toolset).__name__
                    raise Refused(f"the tool server {name} of {self._taskset!r} runs in the agent's container, {hint}")

    def _env_config(self, settings: dict[str, Any], env: dict[str, Any]) -> Any:
        """Return the configuration of a v1 environment from the settings of the taskset and of the environment.

        By default an agent runs in the sandbox of this machine, and in our chat harness if the taskset has none. The
        defaults of verifiers are a cloud and a shell; its `null` harness is the same chat at a higher cost. Its `bash`
        harness needs a network, so in the sandbox our `ShellHarness` takes its place.
        """
        own = {**env.get("taskset", {}), **settings, "id": self._taskset}
        config = resolve_env_config({"interception": {"type": "server"}, **env, "taskset": own})
        has_own_harness = default_harness_id(self._taskset) != "bash"
        agents = {}
        for role, agent in config:
            if isinstance(agent, vf.AgentConfig):
                changes: dict[str, Any] = {}
                if isinstance(agent.runtime, vf.PrimeConfig) and "runtime" not in env.get(role, {}):
                    is_allowed = self._permission == "subprocess"
                    changes["runtime"] = vf.SubprocessConfig() if is_allowed else SandboxRuntimeConfig()
                is_chat = not has_own_harness if agent.harness is None else agent.harness.id == "null"
                is_bash = agent.harness is not None and agent.harness.id == "bash"
                if self._command and "harness" not in env.get(role, {}):
                    changes["harness"] = CommandHarnessConfig(id=COMMAND_HARNESS_ID, command=list(self._command))
                elif self._call_agent is not None and "harness" not in env.get(role, {}):
                    changes["harness"] = FunctionHarnessConfig(
                        id=FUNCTION_HARNESS_ID, call=self._call_agent, is_full=self._is_full
                    )
                elif is_chat and "harness" not in env.get(role, {}):
                    changes["harness"] = ChatHarnessConfig(id=HARNESS_ID)
                elif is_bash and isinstance(changes.get("runtime"), SandboxRuntimeConfig):
                    changes["harness"] = shell_config(agent.harness)
                agents[role] = agent.model_copy(update=changes)
        return config.model_copy(update=agents)


class _Scoring:
    """What the reward functions of one episode have done besides returning numbers.

    Attributes:
        counts_zero: a failed one counts as 0.
        zeros: how many counted as 0, by the id of the trace.
        warnings: topics and texts.
    """

    def __init__(self, counts_zero: bool) -> None:
        self.counts_zero = counts_zero
        self.zeros = Counter[str]()
        self.warnings: list[tuple[str, str]] = []


_scoring: ContextVar[_Scoring | None] = ContextVar("scoring", default=None)
_hooks = vf.Task.hooks


def _hooks_of_episode(task: Any, kind: str) -> list[Callable[..., Any]]:
    """Return the functions of a task, as verifiers does; the failures of its reward functions are contained."""
    found, scoring = _hooks(task, kind), _scoring.get()
    return found if scoring is None or kind != "reward" else [_contained(function, scoring) for function in found]


vf.Task.hooks = _hooks_of_episode  # also of tasks that an environment makes during an episode


def _contained(function: Callable[..., Any], scoring: _Scoring) -> Callable[..., Any]:
    """Return a reward function whose failure counts as 0, says how to reach that, or, at weight 0, is a warning."""
    name, weight = function.__name__, getattr(function, "_vf_weight", 1.0)
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    async def contained(*, trace: Any, **others: Any) -> Any:
        given = {"trace": trace, **others}
        try:
            scores = await function(**{each: value for each, value in given.items() if each in parameters})
            for key, score in scores.items() if isinstance(scores, Mapping) else [(name, scores)]:
                finite_number(f"reward {key}", score)
            return scores
        except Exception as error:
            described = describe(error)
            if weight and described["infrastructure"]:
                raise
            failure = f"{described['message']:.200}"
            if not isinstance(error, NotANumber):
                failure = f"reward function {name} raised {failure}"
            if weight and not scoring.counts_zero:
                raise Failed(f'{failure} (env.reward_errors = "zero" counts it as 0)') from error
            consequence = (
                "it counts as 0 (env.reward_errors)" if weight else "it has weight 0, so only its metric is missing"
            )
            scoring.warnings.append((f"reward {name}", f"{failure}; {consequence}"))
            if not weight:
                return {}
            scoring.zeros[trace.id] += 1
            return 0.0

    named = [each for each in parameters.values() if each.name != "trace" and each.kind is not each.VAR_KEYWORD]
    keyword = [each.replace(kind=each.KEYWORD_ONLY) for each in named]
    trace = inspect.Parameter("trace", inspect.Parameter.KEYWORD_ONLY)
    contained.__signature__ = inspect.Signature([*keyword, trace])  # type: ignore[attr-defined]
    return contained


def _is_infrastructure(error: Any) -> bool:
    """Return whether a retry may succeed; a task's own error names its cause in the message."""
    cause = re.search(r": (\w+): ", error.message)
    kind = getattr(builtins, cause[1], None) if cause is not None else None
    names = (error.type, cause[1] if cause is not None else "")
    return bool(INFRASTRUCTURE & {*names}) or (isinstance(kind, type) and issubclass(kind, ConnectionError))


def _agent(trace: Any, opened: OpenTrace, scoring: _Scoring) -> dict[str, Any]:
    if any(getattr(node, "advantages", None) is not None for node in trace.nodes):
        raise Refused(
            "it sets `advantages` of messages, which would be ignored; record rewards, and set orchestrator.advantage"
        )
    rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    errors = {"reward_errors": float(scoring.zeros[trace.id])} if scoring.counts_zero else {}
    return {
        "agent": opened.agent,
        "name": trace.agent.name,
        "task": getattr(trace.task, "hash", None) or "",
        "replies": opened.replies_in(trace),
        "messages": trace.messages,
        "reward": trace.reward,
        "metrics": {**trace.metrics, **{name: reward.score for name, reward in rewards.items()}, **errors},
        "weights": {name: reward.weight for name, reward in rewards.items()},
        "trace": trace,
    }


class SeparateTaskset(TasksetAdapter):
    """A taskset in an interpreter of its own: the worker answers its agents."""

    def __init__(
        self,
        module: ModuleType,
        taskset: str,
        args: Mapping[str, Any],
        permission: str,
        command: Sequence[str],
        has_agent: bool,
        counts_zero: bool,
        install: str,
        request: Request,
    ) -> None:
        """Load the taskset of a module; see `TasksetAdapter`. `request` asks the worker, which calls an agent."""
        check_taskset(module)
        numbers = itertools.count()

        async def count_tokens(messages: list[Any], tools: list[Any] | None) -> int:
            try:
                return int(await request("count", messages=messages, tools=tools))
            except RequestFailed as error:
                raise ValueError(error.args[1]) from None

        async def call_agent(values: Mapping[str, Any]) -> dict[str, float]:
            try:
                return dict(await request("agent", values=values))
            except RequestFailed as error:
                raise Failed(": ".join(error.args)) from None

        box, agent = lambda: RemoteBox(request, next(numbers)), call_agent if has_agent else None
        super().__init__(taskset, args, permission, box, count_tokens, command, agent, counts_zero, install)
        self._request = request

    async def row(self, example: int) -> dict[str, Any]:
        """Return the columns of a task, and its prompt."""
        return {"row": self.tasks[example].data, "prompt": plain_messages(self.prompt(example), "user"), "tools": []}

    async def run_episode(self, example: int, api_key: str) -> dict[str, Any]:
        """Run one episode, without its traces; see `episode`."""

        async def ask(agent: int, body: Mapping[str, Any]) -> dict[str, Any]:
            asked = {**body, "agent": agent}
            status, answer = await self._request("chat", key=api_key, path="/chat/completions", body=asked)
            if status != 200:
                raise ValueError(answer["error"]["message"])
            return cast(dict[str, Any], answer)

        result = await self.episode(example, ask)
        for agent in result["agents"]:
            del agent["trace"]
            agent["messages"] = plain_messages(agent["messages"], "user")
        return result

    async def close(self) -> None:
        """End the servers."""
        if self._server_task is not None:
            self._server_task.cancel()
            await asyncio.wait([self._server_task])
