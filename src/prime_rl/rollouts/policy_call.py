"""One call of the policy with a request in OpenAI's form, for each client that an environment can use.

Rollouts are sampled with the run's parameters, because the trainer computes with them. A parameter of the environment
is used if it ends a completion or selects tools, ignored with a warning if it only changes how likely tokens are, and
refused otherwise.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.messages import Reply

_LENGTHS = ("max_tokens", "max_completion_tokens")
_USED = frozenset({"messages", "tools", "tool_choice", "stop", "extra_body", *_LENGTHS})

_WITHOUT_EFFECT = frozenset(
    {
        "model",
        "timeout",
        "extra_headers",
        "extra_query",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "stream_options",
    }
)
"""Parameters that change neither the sampled tokens nor the response."""

_OF_THE_RUN = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "reasoning_effort",
        "verbosity",
    }
)
"""Parameters that change how likely tokens are, or nothing with the models that the run can train."""

_DETAILS = frozenset({"logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids"})
"""Parameters that ask for details in the response."""

_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "stream": False,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "modalities": ["text"],
    "functions": [],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "return_token_ids": False,
}
"""Values that change nothing."""

_REASONS = {
    "n": "n > 1 is not supported; call the client several times",
    "parallel_tool_calls": "parallel_tool_calls = false is not supported: a reply may contain several calls",
    "chat_template_kwargs": "chat_template_kwargs is not supported; set rendering.chat_template_args of the run",
}


async def policy_call(
    recorder: Recorder,
    request: Mapping[str, Any],
    sampling: Mapping[str, Any],
    warn: Callable[[str, str], None],
    returned: Iterable[str] = (),
) -> Reply:
    """Sample the reply to a request.

    Args:
        recorder: records the call.
        request: the body of a chat completion.
        sampling: the run's vLLM sampling parameters.
        warn: gets a topic and a warning about ignored parameters.
        returned: details that the response of the caller contains.

    Raises:
        PromptTooLong, InferenceServerLost, InferenceError: see `Recorder.ask`.
        ValueError: the request has a parameter or a message that is not supported.
    """
    extra = request.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra_body is {extra!r:.80}, not a dictionary")
    asked = {**request, **extra} if extra else request  # as the OpenAI client sends it
    tools = _tools(asked)
    other = {
        name: value
        for name, value in asked.items()
        if name not in _USED and name not in _WITHOUT_EFFECT and name not in returned
        if value is not None and value != sampling.get(name, _DEFAULTS.get(name))
    }
    if not tools:
        other.pop("parallel_tool_calls", None)
    if refused := sorted(other.keys() - _OF_THE_RUN - _DETAILS):
        raise ValueError(_REASONS.get(refused[0], f"{refused[0]} is not supported"))
    applies = "`sampling` of the environment's configuration applies to sampling and training"
    _warn_about(other.keys() & _OF_THE_RUN, other, warn, applies)
    _warn_about(other.keys() & _DETAILS, other, warn, "the response does not contain these details")
    return await recorder.ask(asked.get("messages") or (), tools, {**sampling, **_ends(asked, sampling)})


def _warn_about(names: Iterable[str], asked: Mapping[str, Any], warn: Callable[[str, str], None], reason: str) -> None:
    if names := sorted(names):
        given = ", ".join(f"{name} = {asked[name]!r:.40}" for name in names)
        warn(f"sampling {names}", f"its sampling parameters are ignored ({given}), because {reason}")


def _tools(asked: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the offered tools; None if the policy must not call one."""
    tools, choice = asked.get("tools"), asked.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ValueError("only tool_choice auto and none are supported")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools is {tools!r:.80}, not a list of tool definitions")
    for tool in tools:
        if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), Mapping):
            raise ValueError(f"only tools of the type function are supported, not {tool!r:.80}")
        if not isinstance(name := tool["function"].get("name"), str):
            raise ValueError(f"a tool has the name {name!r:.80}, not a text")
    return tools


def _ends(asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that end a completion: the smallest length, and the stop strings."""
    ends: dict[str, Any] = {}
    if limits := [_length(name, asked[name]) for name in _LENGTHS if asked.get(name) is not None]:
        ends["max_tokens"] = min([*limits, sampling.get("max_tokens") or limits[0]])
    if (stop := asked.get("stop")) is not None and stop != []:
        ends["stop"] = _stops(stop)
    return ends


def _length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"{name} is {value!r:.80}, not a whole number of at least 1")
    return int(value)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop is {value!r:.80}, not a text or a list of texts")
    return list(stops)
