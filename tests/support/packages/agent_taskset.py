"""A v1 taskset whose agent speaks one of three APIs through the vendor's client, with or without streams.

It asks for the tool `look`, whose result is the number of the call, until the reply calls no tool. With `edits` it
changes its first message once, which begins another branch. With `leaves` it first disconnects from a request.
"""

import asyncio
import contextlib
import json

import anthropic
import openai
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["AgentHarness", "AgentTaskset"]

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"name": "look", "description": "Look at a place."}
RULES = "Be brief."


class AgentHarnessConfig(HarnessConfig):
    api: str = "chat"
    stream: bool = False
    edits: bool = False
    leaves: bool = False


class AgentHarness(vf.Harness[AgentHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        turn = {"chat": Chat, "messages": Messages, "responses": Responses}[self.config.api](endpoint, secret)
        turn.begin(data.prompt)
        if self.config.leaves:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(turn.ask(self.config.stream), 2.5)  # the stream has started
        for number in range(5):
            calls = await turn.ask(self.config.stream)
            if not calls:
                break
            turn.answer([(name, json.dumps({"number": number, "at": arguments["at"]})) for name, arguments in calls])
            if self.config.edits and number == 1:
                turn.begin(f"{data.prompt} Now!")
        return ProgramResult(0, "", "")


class Chat:
    def __init__(self, endpoint, secret):
        self.client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        self.tools = [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]

    def begin(self, prompt):
        self.messages = [{"role": "system", "content": RULES}, {"role": "user", "content": prompt}]

    async def ask(self, stream):
        keys = {"model": "m", "messages": self.messages, "tools": self.tools, "max_tokens": 300}
        if stream:
            usage, message, finished = None, {"role": "assistant", "content": ""}, None
            keys |= {"stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await self.client.chat.completions.create(**keys):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    message["content"] += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
                    finished = choice.finish_reason or finished
        else:
            completion = await self.client.chat.completions.create(**keys)
            usage, finished = completion.usage, completion.choices[0].finish_reason
            message = completion.choices[0].message.model_dump(exclude_none=True)
        assert usage.completion_tokens > 0
        calls = message.get("tool_calls", [])
        assert finished == ("tool_calls" if calls else "stop")
        self.messages.append(message)
        return [(call["id"], json.loads(call["function"]["arguments"])) for call in calls]

    def answer(self, results):
        for call, result in results:
            self.messages.append({"role": "tool", "tool_call_id": call, "content": result})


class Messages:
    def __init__(self, endpoint, secret):
        self.client = anthropic.AsyncAnthropic(base_url=endpoint.removesuffix("/v1"), api_key=secret, max_retries=0)

    def begin(self, prompt):
        self.messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]

    async def ask(self, stream):
        tools = [{**LOOK, "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
        keys = {"model": "m", "messages": self.messages, "tools": tools, "system": [{"type": "text", "text": RULES}]}
        counted = await self.client.messages.count_tokens(**keys)
        if stream:
            async with self.client.messages.stream(**keys, max_tokens=300) as events:
                async for _ in events:
                    pass
                message = await events.get_final_message()
        else:
            message = await self.client.messages.create(**keys, max_tokens=300)
        assert message.usage.output_tokens > 0
        assert len(self.messages) > 1 or counted.input_tokens == message.usage.input_tokens
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        self.messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        return [(call.id, call.input) for call in calls]

    def answer(self, results):
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": result} for call, result in results]
        self.messages.append({"role": "user", "content": blocks})


class Responses:
    def __init__(self, endpoint, secret):
        self.client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        self.tools = [{"type": "function", **LOOK, "parameters": SCHEMA, "strict": False}, {"type": "web_search"}]

    def begin(self, prompt):
        self.items = [{"role": "user", "content": [{"type": "input_text", "text": prompt}]}]

    async def ask(self, stream):
        keys = {"model": "m", "input": self.items, "tools": self.tools, "instructions": RULES, "max_output_tokens": 300}
        if stream:
            async with self.client.responses.stream(**keys) as events:
                async for _ in events:
                    pass
                response = await events.get_final_response()
        else:
            response = await self.client.responses.create(**keys)
        assert response.status == "completed" and response.usage.output_tokens > 0
        for item in response.output:
            fields = item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            for part in fields.get("content") or ():
                part.pop("parsed", None)
            self.items.append(fields)
        calls = [item for item in response.output if item.type == "function_call"]
        return [(call.call_id, json.loads(call.arguments)) for call in calls]

    def answer(self, results):
        for call, result in results:
            self.items.append({"type": "function_call_output", "call_id": call, "output": result})


class AgentTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(len([node for node in trace.nodes if node.sampled]))


class AgentTaskset(vf.Taskset[AgentTask, vf.TasksetConfig]):
    def load(self):
        return [AgentTask(vf.TaskData(idx=0, prompt="Where is it?"), self.config.task)]
