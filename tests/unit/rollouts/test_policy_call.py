"""Each request parameter is used, ignored with one warning, or refused: in the same way by every client."""

import asyncio

import numpy as np
import openai
import pytest
from verifiers.types import Tool
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

from prime_rl.rollouts.clients.raw_openai_client import PolicyEndpoint
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.messages import Generation
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.separate.interception import InterceptionClient, OpenTrace
from prime_rl.rollouts.verifiers.classic_client import RolloutClient
from prime_rl.rollouts.verifiers.episodes import EpisodeCalls
from tests.support.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
RUN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "max_tokens": 20}
MESSAGES = [{"role": "user", "content": "say it"}]
FUNCTION = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "look"}}
ROUTES = ["classic", "raw", "own", "v1"]


class Engine:
    """Says a word, and keeps what it is asked."""

    def __init__(self):
        self.sampling, self.prompts = [], []

    async def generate(self, prompt_ids, sampling):
        self.prompts.append(TOKENIZER.decode(prompt_ids))
        self.sampling.append(sampling)
        ids = np.array([*TOKENIZER("word")["input_ids"], TOKENIZER.eos_token_id], np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), False)


@pytest.fixture
def ask():
    """Send one request with parameters through a client; the engine and the warnings are its attributes."""

    async def asked(route, **parameters):
        asked.engine, asked.warnings = Engine(), []
        recorder = Recorder(asked.engine, Renderer(TOKENIZER), 2000)

        def warn(topic, message):
            asked.warnings.append(message)

        if route == "v1":
            client = InterceptionClient(None)
            client.traces["t"] = OpenTrace(0, EpisodeCalls(lambda agent: recorder, RUN, warn).ask)
            body = {"model": "m", "messages": MESSAGES, **parameters}
            return await client.get_response(ChatDialect(), body, SamplingConfig(), session_id="t")
        client = RolloutClient(warn, recorder, None, RUN, PolicyEndpoint())
        if route == "classic":
            tools = [Tool(**tool["function"]) for tool in parameters.pop("tools", ())]
            return await client.get_response(MESSAGES, "m", parameters, tools=tools or None)
        if route == "raw":
            return await client.client.chat.completions.create(model="m", messages=MESSAGES, **parameters)
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as own:
            try:
                return await own.chat.completions.create(model="m", messages=MESSAGES, **parameters)
            finally:
                client._endpoint._task.cancel()
                await asyncio.gather(client._endpoint._task, return_exceptions=True)

    return asked


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("parameters", "used"),
    [
        ({}, {}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"stop": []}, {}),
        ({"extra_body": {"stop": "x"}}, {"stop": ["x"]}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 9, "max_tokens": 4}, {"max_tokens": 4}),
        ({"max_tokens": 1000}, {}),
        ({"max_tokens": None}, {}),
        ({"n": 1, "stream": False, "temperature": 1, "presence_penalty": 0, "user": "me", "store": True}, {}),
        ({"response_format": {"type": "text"}, "logit_bias": {}, "logprobs": False, "tool_choice": "auto"}, {}),
        ({"extra_body": {"top_k": -1, "repetition_penalty": 1.0}, "metadata": {"a": "b"}}, {}),
        ({"parallel_tool_calls": False}, {}),
    ],
)
async def test_parameter_that_ends_or_changes_nothing_is_used(ask, route, parameters, used):
    await ask(route, **parameters)
    assert ask.engine.sampling == [{**RUN, **used}]
    assert ask.warnings == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"temperature": 0.2}, "temperature = 0.2"),
        ({"temperature": 0}, "temperature = 0"),
        ({"top_p": 0.9, "seed": 3}, "seed = 3, top_p = 0.9"),
        ({"presence_penalty": 1.5}, "presence_penalty = 1.5"),
        ({"frequency_penalty": -1}, "frequency_penalty = -1"),
        ({"extra_body": {"top_k": 5, "min_tokens": 4}}, "min_tokens = 4, top_k = 5"),
        ({"reasoning_effort": "low"}, "reasoning_effort = 'low'"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs = 3"),
    ],
)
async def test_parameter_of_the_run_is_ignored_with_one_warning(ask, route, parameters, named):
    await ask(route, **parameters)
    assert ask.engine.sampling == [RUN]
    (warning,) = ask.warnings
    assert f"{named})" in warning


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n": 2}, r"n > 1 is not supported; call the client several times"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logit_bias": {"5": -100}}, "logit_bias is not supported"),
        ({"tools": TOOLS, "tool_choice": "required"}, "only tool_choice auto and none are supported"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "only tool_choice auto and none are supported"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls = false is not supported"),
        ({"modalities": ["text", "audio"]}, "modalities is not supported"),
        ({"functions": [FUNCTION]}, "functions is not supported"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "set rendering.chat_template_args of the run"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0, not a whole number of at least 1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5, not a whole number"),
        ({"max_tokens": "5"}, "max_tokens is '5', not a whole number"),
        ({"max_tokens": True}, "max_tokens is True, not a whole number"),
        ({"stop": [3]}, r"stop is \[3\], not a text"),
        ({"stop": [""]}, r"stop is \[''\], not a text or a list of texts"),
    ],
)
async def test_parameter_that_changes_the_reply_is_refused_before_the_call(ask, route, parameters, message):
    with pytest.raises(Exception, match=message):
        await ask(route, **parameters)
    assert ask.engine.sampling == []


@pytest.mark.parametrize("route", ["raw", "own", "v1"])
@pytest.mark.parametrize("tool", [{"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}])
async def test_tool_that_is_no_function_is_refused(ask, route, tool):
    with pytest.raises(Exception, match="only tools of the type function are supported"):
        await ask(route, tools=[*TOOLS, tool])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("choice", "shown"), [("auto", True), (None, True), ("none", False)])
async def test_tool_choice_none_offers_no_tool(ask, route, choice, shown):
    await ask(route, tools=TOOLS, tool_choice=choice)
    assert ("look" in ask.engine.prompts[0]) is shown
    assert ask.warnings == []


@pytest.mark.parametrize("route", ["raw", "own", "v1"])
async def test_log_probabilities_that_the_response_lacks_log_a_warning(ask, route):
    await ask(route, logprobs=True)
    assert "logprobs = True" in ask.warnings[0] and "the response does not contain" in ask.warnings[0]


@pytest.mark.parametrize("route", ["classic", "raw", "own"])
async def test_stream_is_refused(ask, route):
    with pytest.raises(Exception, match="stream is not supported"):
        await ask(route, stream=True)
    assert ask.engine.sampling == []


async def test_call_of_an_agent_without_rollout_is_refused_with_status_400():
    with pytest.raises(ProviderError, match="only calls of a running rollout") as refused:
        await InterceptionClient(None).relay(ChatDialect(), {}, session_id="t")
    assert refused.value.status_code == 400
