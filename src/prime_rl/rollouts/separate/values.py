"""What both adapters of `environment_runner` share: values as JSON, and failures as one line.

Needs only the standard library: it runs in the interpreter of an environment.
"""

import asyncio
import contextvars
import hashlib
import importlib.util
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import date
from decimal import Decimal
from pathlib import PurePath
from types import ModuleType
from typing import Any
from uuid import UUID

CONTEXT_OVERFLOW = "maximum context length"
"""Phrase in the error by which chat harnesses recognise a full context."""

GATEWAY_ENDED = "the gateway has ended"
"""Phrase in the error of a rollout that was lost with its gateway, which may start again."""

MAX_DEPTH = 64

INFRASTRUCTURE = {
    *("InfraError", "SandboxError", "TunnelError", "TransportError", "APIConnectionError"),
    *("ClientConnectionError", "TimeoutError", "InterceptionError", "ToolsetError"),
}
"""Names of exceptions for which a retry may succeed, also of base classes."""


class Failed(Exception):
    """A failure whose message says everything."""


class NotANumber(Failed):
    """A reward function returned no finite number; the message names the function."""


class Refused(Exception):
    """The environment cannot be run: bad arguments, no examples, an unsupported API."""


class BoxError(Exception):
    """The sandbox of an agent has ended or failed."""


class RequestFailed(Exception):
    """The worker could not answer a request: the name of what it raised, and its message."""


Request = Callable[..., Awaitable[Any]]
"""(kind, **arguments) -> the worker's answer; see `environment_runner`."""

AGENT_VALUES = ("messages", "prompt", "task", "model", "base_url", "api_key", "mcp_urls", "role")
"""What an agent function can take: the first messages, and as one text; the columns of the task; name, address and key
of the model; the addresses of the task's tools; and the agent's name in an environment of several."""

OWN_METRICS = ("num_turns", "agent_reward")
"""Metrics of a rollout that no agent can report."""

CallAgent = Callable[[Mapping[str, Any]], Awaitable[dict[str, float]]]
"""Calls an agent function with `AGENT_VALUES`; the answer is its metrics, and its `reward` if it has one."""


def exports_taskset(module: ModuleType) -> bool:
    """Return whether a module with `load_environment` also names a v1 taskset in `__all__`, which agents need."""
    if importlib.util.find_spec("verifiers.v1") is None:
        return False
    from verifiers.v1.utils.loaders import taskset_class

    try:
        taskset_class(module.__name__)
    except (AttributeError, TypeError):
        return False
    return True


def arguments_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return the representations of the defaults of a function's arguments; "" for one without a default."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: "" if each.default is each.empty else repr(each.default) for each in parameters}


def plain_messages(value: Any, role: str) -> list[Any]:
    """Return a prompt or completion as messages; plain text becomes a message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [plain(message) for message in value or ()]


def field(holder: Any, name: str) -> Any:
    """Return a key of a mapping, or an attribute; None without it."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON represents it; what it cannot represent as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, depth + 1) for inner in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump(exclude_none=True), depth + 1)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if callable(convert := getattr(value, "tolist", None)):  # arrays
        return plain(convert(), depth + 1)
    if isinstance(value, date | Decimal | PurePath | UUID | BaseException):
        return str(value)
    if callable(content := getattr(value, "tobytes", None)):  # images
        value = content()
    return hashlib.blake2s(value).hexdigest() if isinstance(value, bytes) else type(value).__qualname__


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as one line, and whether a retry may succeed."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 # foreign code
        text = f"its text raises {type(broken).__name__}"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, Failed | Refused):
        message = text
    if isinstance(error, asyncio.CancelledError) and not was_cancelled(error):
        message += ", although nothing was cancelled"
    return {"message": message, "infrastructure": is_infrastructure(error)}


current_call: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)
cancelled_calls = set[int]()
"""The running calls that the worker has cancelled."""


def was_cancelled(error: BaseException) -> bool:
    """Return whether an exception is the cancellation of the current call by the worker."""
    return isinstance(error, asyncio.CancelledError) and current_call.get() in cancelled_calls


def is_infrastructure(error: "BaseException | None") -> bool:
    """Return whether a retry may succeed: a lost connection or sandbox, an overloaded server."""
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if INFRASTRUCTURE & {kind.__name__ for kind in type(error).__mro__}:
            return True
        status = getattr(error, "status_code", getattr(error, "status", None))
        if isinstance(status, int) and (500 <= status < 600 or status in (408, 425, 429)):
            return True
        error = error.__cause__
    return False


def finite_number(what: str, value: Any) -> float:
    """Return a value as a number; `what` names it. Raises NotANumber."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NotANumber(f"{what} is {value!r:.80}, not a number")
    try:
        number = float(value)
    except (ArithmeticError, TypeError, ValueError) as error:  # arrays, numbers that are too large
        raise NotANumber(f"{what} is {value!r:.80}, not a number: {error}") from None
    if not math.isfinite(number):
        raise NotANumber(f"{what} is {number}, not a finite number")
    return number
