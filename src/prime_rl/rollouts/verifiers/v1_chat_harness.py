"""A chat harness that runs in the worker, without a process per rollout.

The chat harnesses of verifiers start an interpreter per rollout, which costs seconds of CPU time. This one uses the
same interception server, so the limits, stops and hooks of a task work as with any other harness.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from prime_rl.rollouts.verifiers.v1_client import CONTEXT_OVERFLOW

__all__ = ["ChatHarness"]

HARNESS_ID = "prime_rl_chat"
"""Verifiers finds a harness by the name of a top-level module. This module is registered under this name."""

Message = dict[str, Any]


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
        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            tools = McpTools(self.config.tool_timeout, self.config.disabled_tools or ())
            local = self.local_tools()
            local_names = {tool["function"]["name"] for tool in local}
            for name, url in mcp_urls.items():
                await tools.connect(stack, name, url)
            schemas = [*local, *tools.schemas]
            headers = {"Authorization": f"Bearer {secret}"}
            timeout = aiohttp.ClientTimeout(total=None)  # the task has its own limits
            session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})}
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
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


class McpTools:
    """The tools of the MCP servers of one rollout.

    Attributes:
        schemas: their definitions in OpenAI's form.
    """

    def __init__(self, timeout_s: float, disabled: tuple[str, ...] | list[str]) -> None:
        """Limit each call to `timeout_s` seconds; exclude the `disabled` tools."""
        self.schemas: list[Message] = []
        self._timeout_s = timeout_s
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
        async with asyncio.timeout(self._timeout_s):
            result = await client.call_tool(original, json.loads(arguments))
        return "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)


sys.modules.setdefault(HARNESS_ID, sys.modules[__name__])
