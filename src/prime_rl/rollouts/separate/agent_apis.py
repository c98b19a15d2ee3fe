"""The APIs that agents speak, in terms of chat completions: OpenAI's chat and Responses, Anthropic's Messages.

A request becomes the body of a chat completion, and a completion becomes the reply or the stream of the API. A stream
is written once its reply is complete. Tools that a provider would run, such as web search, are left out: the policy
cannot call them. Needs only the standard library.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .values import CONTEXT_OVERFLOW

Body = Mapping[str, Any]


class AgentApi(Protocol):
    """One API. Its methods take requests and replies as decoded JSON."""

    def chat_body(self, request: Body) -> dict[str, Any]:
        """Return the body of a chat completion. Raises ValueError for what cannot be expressed in one."""
        ...

    def reply(self, completion: Body, request: Body) -> dict[str, Any]:
        """Return the reply to a request."""
        ...

    def events(self, reply: Body, request: Body) -> Iterator[bytes]:
        """Yield the stream of a reply, complete events in the format of server-sent events."""
        ...

    def failure(self, status: int, message: str) -> Iterator[bytes]:
        """Yield the events by which a stream fails."""
        ...


class ChatApi:
    """OpenAI's chat completions."""

    def chat_body(self, request: Body) -> dict[str, Any]:
        """See `AgentApi`."""
        if not isinstance(options := request.get("stream_options") or {}, Mapping):
            raise ValueError(f"stream_options is {options!r:.80}, not an object")
        return {name: value for name, value in request.items() if name not in ("stream", "stream_options")}

    def reply(self, completion: Body, request: Body) -> dict[str, Any]:
        """See `AgentApi`."""
        return dict(completion)

    def events(self, reply: Body, request: Body) -> Iterator[bytes]:
        """See `AgentApi`."""
        (choice,) = reply["choices"]
        message = choice["message"]
        head = {**{name: reply[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [
            {"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls") or ())
        ]
        for delta in deltas:
            yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
        if (request.get("stream_options") or {}).get("include_usage"):
            yield _event({**head, "choices": [], "usage": reply["usage"]})
        yield b"data: [DONE]\n\n"

    def failure(self, status: int, message: str) -> Iterator[bytes]:
        """See `AgentApi`."""
        yield _event(error_body(status, message))


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Of Anthropic, by the finish reason of a chat completion."""


class MessagesApi:
    """Anthropic's Messages. `thinking` blocks are the reasoning; the policy decides by itself whether it thinks."""

    _IGNORED = frozenset(
        {"metadata", "service_tier", "thinking", "context_management", "cache_control", "betas", "stream"}
    )

    def chat_body(self, request: Body) -> dict[str, Any]:
        """See `AgentApi`."""
        body = {name: value for name, value in request.items() if name not in self._IGNORED}
        messages = [{"role": "system", "content": _text_parts(system)}] if (system := body.pop("system", None)) else []
        for message in _objects("messages", body.pop("messages", None)):
            convert = self._assistant if message.get("role") == "assistant" else self._user
            messages += convert(message)
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("the last message is of the assistant; to continue it is not supported")
        tools = [
            _function(tool["name"], tool.get("description"), tool["input_schema"])
            for tool in _objects("tools", body.pop("tools", None))
            if "input_schema" in tool or not _is_run_by_the_provider(tool)
        ]
        choice = body.pop("tool_choice", None) or {}
        if choice.get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
        kind = choice.get("type", "auto")
        if not (body.get("output_config") or {}).get("format"):
            body.pop("output_config", None)
        body["stop"] = body.pop("stop_sequences", None)
        return {
            **body,
            "messages": messages,
            **({"tools": tools, "tool_choice": kind if kind in ("auto", "none") else "required"} if tools else {}),
        }

    def _user(self, message: Body) -> Iterator[dict[str, Any]]:
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": message.get("role"), "content": content}
            return
        blocks = _objects("content", content)
        for block in blocks:
            if block.get("type") == "tool_result":
                result = _text_parts(block.get("content") or "")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        if rest := [block for block in blocks if block.get("type") != "tool_result"]:
            yield {"role": message.get("role"), "content": _text_parts(rest)}

    def _assistant(self, message: Body) -> Iterator[dict[str, Any]]:
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": "assistant", "content": content}
            return
        texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
        for block in _objects("content", content):
            match block.get("type"):
                case "text":
                    texts.append(block["text"])
                case "thinking":
                    thoughts.append(block["thinking"])
                case "tool_use":
                    calls.append(_call(block["id"], block["name"], json.dumps(block.get("input") or {})))
                case "redacted_thinking":
                    pass  # of another model
                case kind:
                    raise ValueError(f"content blocks of the type {kind} are not supported")
        yield _assistant("".join(texts), "".join(thoughts), calls)

    def reply(self, completion: Body, request: Body) -> dict[str, Any]:
        """See `AgentApi`."""
        (choice,) = completion["choices"]
        message, usage, reason = choice["message"], completion["usage"], _STOP_REASONS[choice["finish_reason"]]
        stop = choice.get("stop_reason") if reason == "end_turn" else None
        blocks: list[dict[str, Any]] = []
        if reasoning := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            blocks.append({"type": "text", "text": message["content"] or ""})
        for call in calls:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return {
            "id": f"msg_{completion['id']}",
            "type": "message",
            "role": "assistant",
            "model": completion["model"],
            "content": blocks,
            "stop_reason": reason if stop is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def events(self, reply: Body, request: Body) -> Iterator[bytes]:
        """See `AgentApi`."""
        usage = {**reply["usage"], "output_tokens": 0}
        yield _named(
            {"type": "message_start", "message": {**reply, "content": [], "stop_reason": None, "usage": usage}}
        )
        for index, block in enumerate(reply["content"]):
            empty, deltas = self._block_events(block)
            yield _named({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
            for delta in deltas:
                yield _named({"type": "content_block_delta", "index": index, "delta": delta})
            yield _named({"type": "content_block_stop", "index": index})
        end = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
        output = {"output_tokens": reply["usage"]["output_tokens"]}
        yield _named({"type": "message_delta", "delta": end, "usage": output})
        yield _named({"type": "message_stop"})

    def _block_events(self, block: Body) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return what the start of a block lacks, and the deltas."""
        if block["type"] == "tool_use":
            return {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        if block["type"] == "text":
            return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {"thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]

    def failure(self, status: int, message: str) -> Iterator[bytes]:
        """See `AgentApi`."""
        yield _named(error_body(status, message))


class ResponsesApi:
    """OpenAI's Responses, without state of the server. Several calls in a reply are not prevented.

    The function `f` of a namespace `n` is called `n__f`.
    """

    _IGNORED = frozenset(
        {
            *("include", "store", "reasoning", "prompt_cache_key", "prompt_cache_retention", "service_tier", "user"),
            *("metadata", "client_metadata", "safety_identifier", "truncation", "stream", "stream_options"),
            *("max_tool_calls", "top_logprobs", "parallel_tool_calls", "background"),
        }
    )

    def chat_body(self, request: Body) -> dict[str, Any]:
        """See `AgentApi`."""
        body = {name: value for name, value in request.items() if name not in self._IGNORED and value is not None}
        for name in ("previous_response_id", "conversation"):
            if name in body:
                raise ValueError(f"{name} is not supported: the server keeps no state; send the whole input")
        if (text := body.pop("text", None)) and (form := text.get("format")) and form.get("type") != "text":
            body["response_format"] = form
        messages = [{"role": "system", "content": given}] if (given := body.pop("instructions", None)) else []
        messages += self._messages(body.pop("input", None))
        tools = list(self._tools(_objects("tools", body.pop("tools", None))))
        choice = body.pop("tool_choice", "auto")
        body["max_tokens"] = body.pop("max_output_tokens", None)
        return {
            **body,
            "messages": messages,
            **({"tools": tools, "tool_choice": choice if choice in ("auto", "none") else "required"} if tools else {}),
        }

    def _tools(self, tools: Iterable[Body]) -> Iterator[dict[str, Any]]:
        for tool in tools:
            if tool.get("type") == "function":
                yield _function(tool["name"], tool.get("description"), tool.get("parameters") or {})
            elif tool.get("type") == "custom":
                schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
                yield _function(tool["name"], tool.get("description"), schema)
            elif tool.get("type") == "namespace":
                inner = _objects("tools of a namespace", tool.get("tools"))
                yield from self._tools({**each, "name": f"{tool['name']}__{each['name']}"} for each in inner)
            else:
                _is_run_by_the_provider(tool)

    def _messages(self, given: Any) -> Iterator[dict[str, Any]]:
        if isinstance(given, str):
            yield {"role": "user", "content": given}
            return
        run: list[Body] = []  # what one reply consists of
        for item in _objects("input", given):
            kind, role = item.get("type") or "message", item.get("role")
            if kind in ("reasoning", "function_call", "custom_tool_call") or role == "assistant":
                run.append(item)
                continue
            if run:
                yield self._assistant(run)
                run = []
            if kind in ("function_call_output", "custom_tool_call_output"):
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text_parts(item.get("output"))}
            elif kind == "message":
                content = _text_parts(item.get("content"))
                yield {"role": "system" if role == "developer" else role, "content": content}
            else:
                raise ValueError(f"input items of the type {kind} are not supported")
        if run:
            yield self._assistant(run)

    def _assistant(self, items: Iterable[Body]) -> dict[str, Any]:
        texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
        for item in items:
            match item.get("type"):
                case "reasoning":
                    thoughts += [part.get("text", "") for part in item.get("content") or item.get("summary") or ()]
                case "function_call":
                    name = "__".join(filter(None, (item.get("namespace"), item["name"])))
                    calls.append(_call(item["call_id"], name, item["arguments"]))
                case "custom_tool_call":
                    calls.append(_call(item["call_id"], item["name"], json.dumps({"input": item["input"]})))
                case _:
                    content = _text_parts(item.get("content"))
                    texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
        return _assistant("".join(texts), "".join(thoughts), calls)

    def reply(self, completion: Body, request: Body) -> dict[str, Any]:
        """See `AgentApi`."""
        (choice,) = completion["choices"]
        usage, is_cut = completion["usage"], choice["finish_reason"] == "length"
        return {
            "id": f"resp_{completion['id']}",
            "object": "response",
            "created_at": completion["created"],
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "instructions": request.get("instructions"),
            "metadata": {},
            "model": completion["model"],
            "output": list(self._output(completion["id"], choice["message"], request)),
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "top_p": None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _output(self, name: str, message: Body, request: Body) -> Iterator[dict[str, Any]]:
        tools = request.get("tools") or ()
        custom = {tool.get("name") for tool in tools if tool.get("type") == "custom"}
        spaces = {
            f"{tool['name']}__{each['name']}": {"namespace": tool["name"], "name": each["name"]}
            for tool in tools
            if tool.get("type") == "namespace"
            for each in tool.get("tools") or ()
        }
        if reasoning := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            yield {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content}
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            text = {"type": "output_text", "text": message["content"] or "", "annotations": list[Any]()}
            head = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed"}
            yield {**head, "content": [text]}
        for number, call in enumerate(calls):
            function = call["function"]
            common = {"call_id": call["id"], "name": function["name"], "status": "completed"}
            arguments = json.loads(function["arguments"])
            if function["name"] in custom and isinstance(arguments.get("input"), str):
                item = {"type": "custom_tool_call", "id": f"ctc_{name}_{number}", "input": arguments["input"]}
            else:
                item = {"type": "function_call", "id": f"fc_{name}_{number}", "arguments": function["arguments"]}
            yield {**item, **common, **spaces.get(function["name"], {})}

    def events(self, reply: Body, request: Body) -> Iterator[bytes]:
        """See `AgentApi`."""
        started = {**reply, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[dict[str, Any]] = [
            {"type": kind, "response": started} for kind in ("response.created", "response.in_progress")
        ]
        for index, item in enumerate(reply["output"]):
            events += self._item_events(index, item)
        events.append({"type": f"response.{reply['status']}", "response": reply})
        for number, event in enumerate(events):
            yield _named({**event, "sequence_number": number})

    def _item_events(self, index: int, item: Body) -> Iterator[dict[str, Any]]:
        where: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"], "content")
        empty = {**item, field: [] if field == "content" else "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        if field == "content":
            part: dict[str, Any] = item["content"][0]
            where["content_index"], name = 0, part["type"]
            logprobs: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
            yield {"type": f"response.{name}.delta", **where, "delta": part["text"], **logprobs}
            yield {"type": f"response.{name}.done", **where, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **where, "part": part}
        else:
            name = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
            yield {"type": f"response.{name}.delta", **where, "delta": item[field]}
            yield {"type": f"response.{name}.done", **where, field: item[field], "name": item["name"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def failure(self, status: int, message: str) -> Iterator[bytes]:
        """See `AgentApi`."""
        started = {
            "id": "resp_failed", "object": "response", "created_at": 0, "model": "policy", "output": [],
            "status": "in_progress", "error": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        code = error_body(status, message)["error"]["code"] or ("invalid_prompt" if status < 500 else "server_error")
        failed = {**started, "status": "failed", "error": {"code": code, "message": message}}
        for number, (kind, response) in enumerate((("response.created", started), ("response.failed", failed))):
            yield _named({"type": kind, "response": response, "sequence_number": number})


AGENT_APIS: dict[str, AgentApi] = {
    "/chat/completions": ChatApi(),
    "/responses": ResponsesApi(),
    "/v1/messages": MessagesApi(),
}
"""By the path of requests."""


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Of Anthropic, by the status of the response."""


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response in the form of both vendors, with the codes of OpenAI that agents read."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = "invalid_api_key" if status == 401 else None
    if CONTEXT_OVERFLOW in message:
        code = "context_length_exceeded"
    return {"type": "error", "error": {"type": kind, "message": message, "param": None, "code": code}}


_FREE_FORM = ("parameters", "input_schema", "schema", "arguments", "input")
"""Keys of requests with objects of the agent or of the model."""


def without_nulls(value: Any) -> Any:
    """Return a request without keys that are null, which both vendors take for absent ones, in its own fields."""
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: inner if name in _FREE_FORM and isinstance(inner, dict) else without_nulls(inner)
        for name, inner in value.items()
        if inner is not None
    }


def _objects(name: str, value: Any) -> Sequence[Body]:
    """Return a list of objects; None is empty. Raises ValueError."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{name} is {value!r:.80}, not a list of objects")
    return value


def _text_parts(content: Any) -> str | list[dict[str, Any]]:
    """Return text, or its parts in the form of chat completions. Raises ValueError for anything else than text."""
    if isinstance(content, str):
        return content
    parts = []
    for part in _objects("content", content):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ValueError(f"content of the type {kind} is not supported, only text")
        parts.append({"type": "text", "text": text})
    return parts


_RUN_BY_PROVIDERS = (
    "web_search",
    "web_fetch",
    "code_execution",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
)
"""Beginnings of types of tools."""


def _is_run_by_the_provider(tool: Body) -> bool:
    """Return True for a tool that the policy cannot call. Raises ValueError for one that the agent runs itself."""
    if not str(kind := tool.get("type")).startswith(_RUN_BY_PROVIDERS):
        raise ValueError(f"tools of the type {kind} are not supported; offer a function with a schema instead")
    return True


def _function(name: str, description: str | None, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _event(data: Body) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _named(data: Body) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
