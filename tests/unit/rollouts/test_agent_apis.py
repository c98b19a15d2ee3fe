"""Agents of any API, with and without streams: each sampled token is trained once, a conversation is one sample."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
from verifiers.v1.types import AssistantMessage, UserMessage

from prime_rl.configs.environment import EnvConfig
from prime_rl.rollouts.environment_id import identify_environments
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.separate.agent_apis import AGENT_APIS
from prime_rl.rollouts.separate.interception import OpenTrace
from prime_rl.rollouts.workers import worker_main
from tests.unit.rollouts.conftest import PACKAGES, TOKENIZER, encode, ending_server, generation, served

pytestmark = pytest.mark.usefixtures("installed")
LOOK = '<tool_call>{"name": "look", "arguments": {"at": "%s"}}</tool_call>'
SAID = (
    '<think>\nfirst\n</think>\n\nI look. <tool_call>{"arguments": {"at":"h\\u00e9re", "b": [1, 2.0]},  "name": "look"}'
    "</tool_call>",
    LOOK % "a" + LOOK % "b",
    LOOK % "",
    "It is there.",
)
CHAT, RESPONSES, MESSAGES = (AGENT_APIS[path] for path in ("/chat/completions", "/responses", "/v1/messages"))


def load(interpreter=None, **keys):
    name = "agent_taskset" if interpreter is None else str(PACKAGES / "agent_taskset.py")
    args = {"env": {"agent": {"harness": {"id": "agent_taskset", **keys}}}}
    return worker_main.load(EnvConfig(id=name, args=args, interpreter=interpreter), Renderer(TOKENIZER), "train")


async def run(interpreter=None, **keys):
    """Return the rollouts of a group of one, and the prompt and the reply of each request that the engine got."""
    sampled = []

    def reply(body):
        sampled.append((body["token_ids"], encode(SAID[min(len(sampled), 3)])))
        return sampled[-1][1], "stop"

    environment = load(interpreter, **keys)
    async with served(environment, reply) as (_, engine):
        return await environment.run_group(0, 1, engine, {"max_tokens": 300}, 8192), sampled


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_tokens_of_an_agent_are_trained_once(api, stream):
    (rollout,), sampled = await run(api=api, stream=stream)
    (sample,) = rollout.samples
    assert sample.tokens[sample.loss_mask].tolist() == [token for _, ids in sampled for token in ids]
    prompt, last = sampled[-1]
    assert sample.tokens.tolist() == prompt + last, "the context of each token is what the engine saw"
    assert rollout.reward == rollout.metrics["num_turns"] == 4
    assert [role for role, _ in rollout.text] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_edited_conversation_is_one_sample_per_branch(api, interpreter):
    (rollout,), sampled = await run(interpreter, api=api, stream=True, edits=True)
    assert [sample.tokens.tolist() for sample in rollout.samples] == [
        prompt + ids for prompt, ids in (sampled[1], sampled[3])
    ]
    trained = [token for sample in rollout.samples for token in sample.tokens[sample.loss_mask].tolist()]
    assert trained == [token for _, ids in sampled for token in ids]


class SlowEngine:
    """Its first request is answered only if it is cancelled; the next one waits for this."""

    def __init__(self):
        self.freed, self.count = asyncio.Event(), 0

    async def generate(self, prompt_ids, sampling):
        self.count += 1
        if self.count == 1:
            try:
                await asyncio.Event().wait()
            finally:
                self.freed.set()
        await asyncio.wait_for(self.freed.wait(), 60)
        return generation(encode("no"))


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
@pytest.mark.parametrize("stream", [False, True])
async def test_agent_that_disconnects_frees_the_request(interpreter, stream):
    environment = load(interpreter, leaves=True, stream=stream)
    async with ending_server(environment):
        (rollout,) = await environment.run_group(0, 1, SlowEngine(), {"max_tokens": 300}, 8192)
    assert rollout.reward == 1.0, "one reply"


def test_a_stream_that_an_agent_left_is_not_taken_for_an_equal_reply_to_another_prompt():
    user, said = UserMessage(content="kept"), AssistantMessage(content="yes")
    nodes = [SimpleNamespace(message=user, parent=None, sampled=False)]
    nodes.append(SimpleNamespace(message=said, parent=0, sampled=True))
    streamed = [([UserMessage(content="left")], said.model_copy(), "0-0"), ([user], said.model_copy(), "0-1")]
    assert OpenTrace(0, None, streamed=streamed).replies_in(SimpleNamespace(nodes=nodes)) == ["0-1"]


@pytest.mark.extended
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_agents_of_another_release_of_verifiers(api):
    """It needs a package index, or packages in uv's cache."""
    config = EnvConfig(id=str(PACKAGES / "agent_taskset.py"), requirements=["verifiers==0.4.0"])
    [config] = identify_environments([config], "env", pytest.fail, print)
    (rollout,), sampled = await run(config.interpreter, api=api, stream=True)
    (sample,) = rollout.samples
    assert sample.tokens[sample.loss_mask].tolist() == [token for _, ids in sampled for token in ids]


@pytest.mark.parametrize(
    ("api", "request_", "problem"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type image"),
        (MESSAGES, {"messages": "hello"}, "messages is 'hello', not a list"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        (MESSAGES, {"messages": [], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "the type bash_20250124"),
        (RESPONSES, {"input": "a", "tools": [{"type": "local_shell"}]}, "the type local_shell are not supported"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "type item_reference"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type input_image"),
        (RESPONSES, {"input": [3]}, r"input is \[3\], not a list of objects"),
    ],
)
def test_what_no_chat_completion_expresses_is_refused(api, request_, problem):
    with pytest.raises(ValueError, match=problem):
        api.chat_body(request_)


def test_settings_are_passed_on_or_left_to_the_check_of_chat_completions():
    tool = {"name": "f", "input_schema": {}}
    body = MESSAGES.chat_body(
        {
            "messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": {"type": "any"},
            "stop_sequences": ["x"], "max_tokens": 3, "metadata": {"user_id": "b"}, "thinking": {"type": "enabled"},
            "output_config": {"effort": "low"}, "container": "c",
        }
    )  # fmt: skip
    assert {name: body[name] for name in ("tool_choice", "stop", "max_tokens", "container")} == {
        "tool_choice": "required", "stop": ["x"], "max_tokens": 3, "container": "c"
    }  # fmt: skip
    assert body.keys().isdisjoint({"metadata", "thinking", "output_config", "stop_sequences"})
    form = {"type": "json_schema", "schema": {}}
    body = RESPONSES.chat_body({"input": "a", "text": {"format": form}, "temperature": 0.5, "store": False})
    assert (body["response_format"], body["temperature"], "store" in body) == (form, 0.5, False)


def completion_with(name, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return call, {
        "id": "0-1", "created": 0, "model": "m",
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }  # fmt: skip


def test_functions_of_a_namespace_have_its_name_before_theirs():
    spawn = {"type": "function", "name": "spawn", "parameters": {}}
    request = {"input": "a", "tools": [{"type": "namespace", "name": "agents", "tools": [spawn]}]}
    assert [tool["function"]["name"] for tool in RESPONSES.chat_body(request)["tools"]] == ["agents__spawn"]
    call, completion = completion_with("agents__spawn", "{}")
    (item,) = RESPONSES.reply(completion, request)["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    result = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    assert RESPONSES.chat_body({"input": [item, result]})["messages"][0]["tool_calls"] == [call]


def test_custom_tools_take_text():
    request = {"input": "a", "tools": [{"type": "custom", "name": "patch"}]}
    (tool,) = RESPONSES.chat_body(request)["tools"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    call, completion = completion_with("patch", '{"input": "*** a"}')
    reply = RESPONSES.reply(completion, request)
    (item,) = reply["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** a")
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    history = RESPONSES.chat_body({"input": [item, result]})["messages"]
    assert history[0]["tool_calls"] == [call] and history[1]["content"] == "done"
    kinds = [json.loads(event.split(b"data: ")[1])["type"] for event in RESPONSES.events(reply, request)]
    assert kinds[-1] == "response.completed" and "response.custom_tool_call_input.done" in kinds
