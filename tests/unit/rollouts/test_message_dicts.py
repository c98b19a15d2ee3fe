"""Messages for packages of any verifiers release: dictionaries with attributes, which are models for `isinstance`."""

import copy
import json
import pickle

import pytest
import verifiers as vf
from datasets import Dataset
from pydantic import BaseModel
from verifiers.types import AssistantMessage, TextContentPart, ToolCall, ToolMessage, UserMessage

from prime_rl.rollouts.separate.message_dicts import MessageDict, message_dict
from prime_rl.rollouts.verifiers.rubrics import patch_verifiers, score_group

CALL = ToolCall(id="1", name="add", arguments='{"a": 1}')
SPOKEN = AssistantMessage(content="Hi", tool_calls=[CALL])


def test_message_is_a_dictionary_with_attributes_and_a_model():
    patch_verifiers()
    message = message_dict(AssistantMessage(content="Hi"))
    assert isinstance(message, dict) and isinstance(message, AssistantMessage) and isinstance(message, BaseModel)
    assert not isinstance(message, UserMessage)
    assert message == {"role": "assistant", "content": "Hi"} == json.loads(json.dumps(message))
    assert (message["content"], message.content, message.get("content")) == ("Hi", "Hi", "Hi")
    assert message.model_dump(exclude_none=True) == AssistantMessage(content="Hi").model_dump(exclude_none=True)
    assert AssistantMessage(content="Hi") == message == AssistantMessage(content="Hi")
    assert AssistantMessage(content="Ho") != message != AssistantMessage(content="Ho")
    assert message_dict(message) is message


def test_absent_field_is_none_as_attribute_and_no_key():
    message = message_dict(AssistantMessage(content="Hi"))
    assert message.tool_calls is None and message["tool_calls"] is None
    assert "tool_calls" not in message and message.get("tool_calls", []) == []
    assert "content" in message_dict(AssistantMessage(tool_calls=[CALL])), "which messages of OpenAI's API always have"
    asked = message_dict(UserMessage(content="Hi"))
    assert not hasattr(asked, "tool_calls")
    with pytest.raises(KeyError):
        asked["tool_calls"]


def test_message_that_verifiers_would_not_accept_has_methods():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    for odd in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": None},
    ):
        assert message_dict(odd).model_dump()["role"] == odd["role"]
    assert message_dict({"role": "assistant", "tool_calls": [call]}).model_dump()["tool_calls"][0]["name"] == "add"


@pytest.mark.parametrize(
    "repeat",
    [
        copy.copy,
        copy.deepcopy,
        lambda message: pickle.loads(pickle.dumps(message)),  # noqa: S301  our own
        lambda message: message.copy(update={"content": "Hi"}),
        lambda message: type(message)(**message),
        lambda message: type(message)((key, value) for key, value in message.items()),
    ],
)
def test_copy_is_of_the_same_kind_and_independent(repeat):
    message = message_dict(SPOKEN)
    again = repeat(message)
    assert type(again) is MessageDict and again == message and again is not message
    assert isinstance(again, AssistantMessage) and again.tool_calls[0].name == "add"
    again.content = "Ho"
    assert message["content"] == "Hi" and again["content"] == "Ho"


@pytest.mark.parametrize(
    "call",
    [CALL, {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    ids=["verifiers", "openai"],
)
def test_tool_call_has_the_forms_of_verifiers_and_openai(call):
    given = AssistantMessage(content="Hi", tool_calls=[CALL])
    message = message_dict(given if call is CALL else {"role": "assistant", "content": "Hi", "tool_calls": [call]})
    (found,) = message["tool_calls"]
    assert isinstance(found, dict) and isinstance(found, ToolCall)
    assert found.name == found["name"] == found.function.name == found["function"]["name"] == "add"
    assert found.get("function", {}).get("arguments") == found["arguments"] == '{"a": 1}'
    assert found.id == "1" and found.type == "function" and "function" in found and "name" in found
    assert json.loads(json.dumps(found)) == (CALL.model_dump() if call is CALL else call)


def test_parts_of_content_are_dictionaries_with_attributes():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for message in (
        UserMessage(content=[TextContentPart(text="a"), image]),
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
    ):
        text, picture = message_dict(message).content
        assert text["text"] == text.text == "a" and isinstance(text, TextContentPart)
        assert picture["image_url"]["url"] == picture.image_url.url == "data:"
        assert vf.Parser()._content_to_text([text, picture]) == "a"


def test_model_of_foreign_code_may_contain_a_message():
    class Record(BaseModel):
        messages: list[AssistantMessage | ToolMessage]

    spoken, answered = message_dict(SPOKEN), message_dict(ToolMessage(tool_call_id="1", content="2"))
    record = Record(messages=[spoken, answered])
    expected = Record(messages=[SPOKEN, ToolMessage(tool_call_id="1", content="2")])
    assert record.model_dump(exclude_none=True) == expected.model_dump(exclude_none=True)
    assert json.loads(record.model_dump_json()) == json.loads(expected.model_dump_json())


def messages_of(prompt, completion, state):
    steps = [message for step in state["trajectory"] for message in (*step["prompt"], *step["completion"])]
    return [*prompt, *completion, *state["prompt"], *state["completion"], *steps]


def old_reward(prompt, completion, state):
    """As packages of the time before verifiers 0.1.12."""
    seen = messages_of(prompt, completion, state)
    return float(all(isinstance(message, dict) and message["content"] for message in seen))


def new_reward(prompt, completion, state):
    """As packages of the time since."""
    seen = messages_of(prompt, completion, state)
    return float(all(isinstance(message, vf.types.CustomBaseModel) and message.content for message in seen))


def group_reward(completions, prompts, states):
    seen = zip(completions, prompts, states, strict=True)
    return [float(isinstance(c[-1], dict) and c[-1].content == s["completion"][-1]["content"]) for c, _, s in seen]


@pytest.mark.parametrize("kind", ["models", "dictionaries"])
async def test_reward_functions_of_both_ages_read_messages_that_an_environment_made(kind):
    patch_verifiers()
    asked, said = UserMessage(content="1 + 1"), AssistantMessage(content="2")
    if kind == "dictionaries":
        asked, said = asked.model_dump(), {"role": "assistant", "content": "2"}
    state = vf.State(input={"prompt": [asked], "answer": "2"})
    state |= {
        "completion": [said],
        "trajectory": [{"prompt": [asked], "completion": [said], "advantage": 0, "reward": 0}],
    }
    rubric = vf.Rubric(funcs=[old_reward, new_reward, group_reward])
    assert await score_group(rubric, [state]) == {}
    assert state["metrics"] == {"old_reward": 1.0, "new_reward": 1.0, "group_reward": 1.0}


class OldConversation(vf.MultiTurnEnv):
    """Tests and indexes messages in each hook, as packages for early releases do; answers with plain dictionaries."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    async def setup_state(self, state):
        self.seen += state["prompt"]
        return state

    async def env_response(self, messages, state, **kwargs):
        self.seen += messages
        return [{"role": "user", "content": "again"}]

    @vf.stop
    async def has_enough(self, state):
        self.seen += [message for step in state["trajectory"] for message in (*step["prompt"], *step["completion"])]
        return len(state["trajectory"]) == 2


async def test_hooks_of_an_environment_get_dictionaries_with_attributes(play_classic):
    env = OldConversation(
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "say it"}], "answer": ""}]),
        rubric=vf.Rubric(funcs=[old_reward, new_reward]),
    )
    (rollout,) = await play_classic(env)
    assert rollout.metrics["old_reward"] == rollout.metrics["new_reward"] == 1.0
    assert len(env.seen) > 8
    for message in env.seen:
        assert isinstance(message, dict) and isinstance(message, vf.types.CustomBaseModel)
        assert message["content"] == message.content and message["role"] == message.role
