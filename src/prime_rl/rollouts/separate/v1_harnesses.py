"""Our harnesses: a chat and a coding agent in the worker, and any program as an agent in the sandbox.

The chat harnesses of verifiers start an interpreter per rollout, which costs seconds of CPU time. Ours use the same
interception server, so the limits, stops and hooks of a task work as with any other harness.

The coding agent is verifiers' `bash` harness with only its tools in the box. The program of verifiers' harness installs
packages and calls the model over the network, and the sandbox has none.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import aiohttp
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from pydantic import Field
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.bash.harness import BASH_SYSTEM_PROMPT, EDIT_SYSTEM_PROMPT, BashHarnessConfig
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.types import Messages

from .agent_runtime import SandboxRuntime
from .values import CONTEXT_OVERFLOW, CallAgent, plain

HARNESS_ID = "prime_rl_chat"
SHELL_HARNESS_ID = "prime_rl_shell"
COMMAND_HARNESS_ID = "prime_rl_command"
FUNCTION_HARNESS_ID = "prime_rl_function"

Message = dict[str, Any]

CONNECTIONS = ContextVar[aiohttp.ClientSession]("CONNECTIONS")
"""Those to the interception server, which the rollouts of a process share."""


class ChatHarnessConfig(HarnessConfig):
    """A harness without further options."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Alternates replies and tool results until a reply calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run the conversation; called by verifiers."""
        messages = _first_messages(*self.resolve_prompt(data))
        async with AsyncExitStack() as stack:
            tools = McpTools(self.config.tool_timeout, self.config.disabled_tools or ())
            local = self.local_tools()
            local_names = {tool["function"]["name"] for tool in local}
            for name, url in mcp_urls.items():
                await tools.connect(stack, name, url)
            schemas = [*local, *tools.schemas]
            url, headers = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})}
                async with CONNECTIONS.get().post(url, json=body, headers=headers) as response:
                    answer = await response.read()
                if response.status != 200:
                    # A full context ends the conversation, which is scored with its turns so far.
                    full = response.status == 400 and CONTEXT_OVERFLOW.encode() in answer
                    return ProgramResult(0 if full else 1, "", answer.decode(errors="replace"))
                message = json.loads(answer)["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, message["content"] or "", "")
                for call in message["tool_calls"]:
                    name = call["function"]["name"]
                    if name in local_names:
                        content = await self.call_local(name, call["function"]["arguments"], runtime)
                    else:
                        content = await tools.call(name, call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})

    def local_tools(self) -> list[Message]:
        """Return the definitions of further tools, which `call_local` runs."""
        return []

    async def call_local(self, name: str, arguments: str, runtime: Runtime) -> str:
        """Return the result of one of `local_tools`; its arguments are JSON from the model."""
        raise LookupError(f"{type(self).__name__} has no tool {name}")


def _first_messages(system: str | None, prompt: str | Messages | None) -> list[Message]:
    """Return what a conversation starts with, in OpenAI's form."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or []]


class McpTools:
    """The tools of the MCP servers of one rollout.

    Attributes:
        schemas: their definitions in OpenAI's form.
    """

    def __init__(self, timeout_seconds: float, disabled: tuple[str, ...] | list[str]) -> None:
        """Limit each call to `timeout_seconds` seconds; exclude the `disabled` tools."""
        self.schemas: list[Message] = []
        self._timeout_seconds = timeout_seconds
        self._disabled = set(disabled)
        self._owners: dict[str, tuple[Client, str]] = {}

    async def connect(self, stack: AsyncExitStack, server: str, url: str) -> None:
        """Connect to a server until `stack` closes, and list its tools."""
        client = await stack.enter_async_context(Client(streamable_http_client(url)))
        for tool in (await client.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            if name in self._disabled:
                continue
            if name in self._owners:
                raise ValueError(f"two tools are called {name!r}")
            self._owners[name] = (client, tool.name)
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            self.schemas.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool. The result of an unknown tool is an error message for the model; other failures raise."""
        if name not in self._owners:
            return f"error: there is no tool {name!r}"
        client, original = self._owners[name]
        async with asyncio.timeout(self._timeout_seconds):
            result = await client.call_tool(original, json.loads(arguments))
        return "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)


def _tool(name: str, description: str, parameters: dict[str, str]) -> Message:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_BASH = _tool(
    "bash", "Run a bash command and return its combined stdout and stderr.", {"command": "The bash command to run."}
)
_EDIT = _tool(
    "edit",
    "Replace a unique string in a file. old_str must appear exactly once in the file.",
    {
        "path": "File path (relative to cwd or absolute).",
        "old_str": "Exact string to find (must appear exactly once).",
        "new_str": "Replacement string.",
    },
)


class ShellHarnessConfig(BashHarnessConfig):
    """The options of verifiers' `bash` harness."""


class ShellHarness(ChatHarness):
    """A chat whose model has the tools `bash` and `edit`, which act in the runtime of the rollout."""

    EXECUTES_CODE = True

    config: ShellHarnessConfig

    def resolve_prompt(self, task: TaskData) -> tuple[str | None, str | Messages | None]:
        """Return the system prompt of verifiers' harness with that of the task, and the prompt; called by verifiers."""
        system, prompt = super().resolve_prompt(task)
        own = f"{BASH_SYSTEM_PROMPT} {EDIT_SYSTEM_PROMPT}" if self.config.edit else BASH_SYSTEM_PROMPT
        return "\n\n".join(filter(None, (own, system))), prompt

    def local_tools(self) -> list[Message]:
        """Return the definitions of the tools."""
        return [_BASH, _EDIT] if self.config.edit else [_BASH]

    async def call_local(self, name: str, arguments: str, runtime: Runtime) -> str:
        """Return the result of a tool. A mistake of the model is a result, too; errors of the sandbox are raised."""
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        names = ("command",) if name == "bash" else ("path", "old_str", "new_str")
        if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in names):
            return f"error: the arguments of {name} are {', '.join(names)}, all of them text"
        if any("\0" in values[key] for key in names):
            return "error: an argument contains a null character"
        if name == "bash":
            result = await runtime.run(["bash", "-c", values["command"]], self.config.resolved_env)
            return result.stdout + result.stderr
        return await _edit(runtime, **{key: values[key] for key in names})


async def _edit(runtime: Runtime, path: str, old_str: str, new_str: str) -> str:
    if not path or not old_str:
        return "error: 'path' and 'old_str' must not be empty"
    try:
        content = (await runtime.read(path)).decode()
        if (count := content.count(old_str)) != 1:
            return f"error: old_str must appear exactly once in {path} (found {count})"
        await runtime.write(path, content.replace(old_str, new_str, 1).encode())
    except (OSError, UnicodeError) as error:
        return f"error: {error}"
    return f"Edited {path}"


def shell_config(config: Any) -> ShellHarnessConfig:
    """Return the configuration of this harness from that of verifiers' `bash` harness."""
    return ShellHarnessConfig(**{**config.model_dump(exclude_unset=True), "id": SHELL_HARNESS_ID})


class CommandHarnessConfig(HarnessConfig):
    """A program with its arguments, in which `{prompt}`, `{model}`, `{base_url}` and `{api_key}` are replaced."""

    command: list[str]


class ProgramMissing(HarnessError):
    """The program of `command`, or one that it names, is not there for any task."""


_NOT_STARTED = re.compile(
    r"(\S+): (?:\[Errno \d+] .*|(?:command )?not found|No such file or directory|Permission denied|Is a directory)$"
)
"""How shells, `env` and the sandbox say that there is no such program."""
_OWN_FOLDERS = ("/app/", "/tests/", "/logs/", "/tmp/")
"""What a task or an agent fills; elsewhere, programs are the same for all tasks."""


class CommandHarness(Harness[CommandHarnessConfig]):
    """Runs a program, such as a coding agent, that finds the model by the variables of OpenAI's or Anthropic's SDKs.

    A program that fails after at least one reply is scored by what it has done, like one that succeeds: its exit code
    is the metric `agent_exit_code`. Without a reply the rollout fails.
    """

    SUPPORTS_MCP = False
    EXECUTES_CODE = True
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run the program; called by verifiers."""
        values = {"prompt": prompt_text(data), "model": ctx.model, "base_url": endpoint, "api_key": secret}
        argv = [
            re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), part) for part in self.config.command
        ]
        env = {
            **self.config.resolved_env,
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_API_BASE": endpoint,
            "OPENAI_API_KEY": secret,
            "ANTHROPIC_BASE_URL": endpoint.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": secret,
        }
        if isinstance(runtime, SandboxRuntime):
            result = await runtime.run_agent(argv, env, [endpoint])
        else:
            result = await runtime.run_program(argv, env)
        trace.record_metric("agent_exit_code", float(result.exit_code))
        if any(node.sampled for node in trace.nodes):
            return ProgramResult(0, result.stdout, result.stderr)
        if result.exit_code in (126, 127) and isinstance(runtime, SandboxRuntime):  # a container's programs may differ
            self._check_program(result.stderr.strip().rpartition("\n")[2])
        return result if result.exit_code else ProgramResult(1, "", f"it called no model; it printed: {result.stdout}")

    def _check_program(self, complaint: str) -> None:
        """Raise ProgramMissing if the last line of the errors names a program of `command` that no task can bring."""
        if (found := _NOT_STARTED.search(complaint)) is None:
            return
        name, named = found[1].strip("'\"\u2018\u2019"), re.split(r"[\s;&|()'\"]+", " ".join(self.config.command))
        if name in named and not name.startswith(_OWN_FOLDERS) and name.find("/") <= 0:
            raise ProgramMissing(complaint)


class FunctionHarnessConfig(HarnessConfig):
    """What calls the user's function, and whether a prompt of a trace did not fit. Traces contain neither."""

    call: CallAgent = Field(exclude=True)
    is_full: Callable[[str], bool] = Field(exclude=True)


class FunctionHarness(Harness[FunctionHarnessConfig]):
    """Awaits a function of the user, whose reward is added to that of the task.

    A full context ends the conversation, which is scored with its turns so far; another exception fails the rollout.
    """

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Await the function; called by verifiers."""
        values = {
            "messages": _first_messages(data.system_prompt, data.prompt),
            "prompt": data.prompt_text,
            "task": plain(data),
            "model": ctx.model,
            "base_url": endpoint,
            "api_key": secret,
            "mcp_urls": mcp_urls,
            "role": trace.agent.name,
        }
        try:
            returned = dict(await self.config.call(values))
        except Exception as error:
            is_full = CONTEXT_OVERFLOW in str(error) and self.config.is_full(trace.id)
            if not is_full or not any(node.sampled for node in trace.nodes):
                raise
            returned = {}
        if not any(node.sampled for node in trace.nodes):
            return ProgramResult(1, "", "it called no model")
        if (reward := returned.pop("reward", None)) is not None:
            trace.record_reward("agent_reward", reward)
        trace.record_metrics(returned)
        return ProgramResult(0, "", "")


_MAX_ARGUMENT_BYTES = 128_000
"""Linux limits an argument to 131,072 bytes."""


def prompt_text(data: TaskData) -> str:
    """Return a task's prompt, with its system prompt, as one argument. Raises ValueError if none can contain it."""
    text = _joined_prompt(data)
    if (size := len(text.encode(errors="surrogatepass"))) > _MAX_ARGUMENT_BYTES:
        raise ValueError(f"its prompt has {size:,} bytes, but an argument of a command at most {_MAX_ARGUMENT_BYTES:,}")
    if "\0" in text:
        raise ValueError("its prompt contains a null character, which no argument of a command can")
    return text


def _joined_prompt(data: TaskData) -> str:
    if isinstance(data.prompt, str):
        return "\n\n".join(filter(None, (data.system_prompt, data.prompt)))
    parts = [data.system_prompt or ""]
    for message in map(message_to_wire, data.prompt or []):
        if message["role"] in ("assistant", "tool") or not isinstance(message["content"], str):
            raise ValueError("its prompt is a conversation, or not only text, which no command line can contain")
        parts.append(message["content"])
    return "\n\n".join(filter(None, parts))


for _id, _harness in (
    (HARNESS_ID, ChatHarness),
    (SHELL_HARNESS_ID, ShellHarness),
    (COMMAND_HARNESS_ID, CommandHarness),
    (FUNCTION_HARNESS_ID, FunctionHarness),
):
    # Verifiers finds a harness by the name of a top-level module, which exports one.
    _module = sys.modules.setdefault(_id, ModuleType(_id))
    _module.__dict__.update({"__all__": [_harness.__name__], _harness.__name__: _harness})
