"""Stored conversations of all formats are read to the same messages."""

import json

import pytest

from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.rollouts.rendering.conversations import (
    Conversation,
    PromptCompletion,
    RowError,
    TrackedRow,
    read_row,
)

ARGUMENTS = {"city": "Bern", "days": 2, "note": None}
CALL = {"id": "", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {}, "note": {}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
EXPECTED = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]
TEXT = json.dumps({"name": "weather", "arguments": ARGUMENTS})


def unread(row, **options):
    tracked = TrackedRow(row)
    read_row(tracked, SFTDataConfig(**options))
    return tracked.unread()


def openai(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}], **more}


def share(role, text):
    return {"from": role, "value": text}


SHAREGPT = [
    share("human", "weather?"), share("function_call", TEXT), share("observation", "sunny"),
    share("gpt", "It is sunny."),
]  # fmt: skip
LEGACY = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
}
OBJECTS = [*EXPECTED[:2], openai(ARGUMENTS, refusal=None), *EXPECTED[3:]]
FORMS = {
    "openai": {"messages": [*EXPECTED[:2], openai(json.dumps(ARGUMENTS)), *EXPECTED[3:]], "tools": [TOOL]},
    "objects": {"messages": OBJECTS, "tools": json.dumps([TOOL])},
    "legacy": {
        "messages": [*EXPECTED[:2], LEGACY, *EXPECTED[3:]],
        "functions": [TOOL["function"]],
    },
    "parts": {
        "messages": [
            {"role": "System", "content": [{"type": "text", "text": "be short"}]},
            {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
            openai(ARGUMENTS),
            {"role": "tool", "content": [{"type": "text", "text": "sunny"}]},
            {"role": "Assistant", "content": "It is sunny."},
        ],
        "tool_defs": [TOOL],
    },
    "sharegpt": {"conversations": SHAREGPT, "system": "be short", "tools": json.dumps([TOOL["function"]])},
    "text": {"messages": json.dumps([EXPECTED[0], *SHAREGPT]), "tools": [TOOL]},
    "dashes": {
        "conversations": [SHAREGPT[0], share("function-call", TEXT), share("function-response", "sunny"), SHAREGPT[3]],
        "system": [{"type": "text", "text": "be short"}], "tools": [TOOL],
    },
    "pair": {"prompt": EXPECTED[:2], "completion": [openai(ARGUMENTS), *EXPECTED[3:]], "tools": [TOOL]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_conversation_of_each_form_has_the_same_messages(form):
    chat = read_row(FORMS[form], SFTDataConfig())
    assert isinstance(chat, Conversation)
    assert [{k: v for k, v in m.items() if k not in ("refusal",)} for m in chat.messages] == EXPECTED
    assert chat.tools == [TOOL] and chat.first == (2 if form == "pair" else 0)


def test_xlam_row_becomes_a_call_and_a_json_schema():
    types = {
        "city": {"type": "str", "description": "c"},
        "days": {"type": "int, optional", "description": "n"},
        "tags": {"type": "List[str]", "default": "x"},
        "note": {"type": "Optional[float]"},
    }
    row = {
        "id": 1,
        "query": "weather?",
        "answers": json.dumps([{"name": "weather", "arguments": ARGUMENTS}]),
        "tools": json.dumps([{"name": "weather", "description": "d", "parameters": types}]),
    }
    chat = read_row(row, SFTDataConfig())
    assert chat.messages == EXPECTED[1:3]
    schema = chat.tools[0]["function"]["parameters"]
    assert [one["type"] for one in schema["properties"].values()] == ["string", "integer", "array", "number"]
    assert schema["required"] == ["city"] and unread(row) == ["id"]


def test_hermes_row_keeps_its_text_and_describes_tools_once():
    call = f"<tool_call>\n{TEXT}\n</tool_call>"
    system = 'You may call functions in <tools> [{"name": "weather"}] </tools>.'
    turns = [share("system", system), share("human", "weather?"), share("gpt", call),
             share("tool", '<tool_response>\n{"sky": "sunny"}\n</tool_response>')]  # fmt: skip
    chat = read_row({"conversations": turns, "tools": json.dumps([TOOL])}, SFTDataConfig())
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.messages[2]["content"] == call and chat.messages[3]["content"] == turns[3]["value"]
    assert chat.tools is None


def test_alpaca_row_with_input_system_and_history():
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "s", "history": [["Hi", "Hello"]]}
    chat = read_row(row, SFTDataConfig())
    assert [(m["role"], m["content"]) for m in chat.messages] == [
        ("system", "s"), ("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n1 2"), ("assistant", "3"),
    ]  # fmt: skip
    assert read_row({"instruction": "Hi", "input": "", "output": "Yo"}, SFTDataConfig()).messages[0]["content"] == "Hi"
    dolly = {"instruction": "Add.", "context": "1 2", "response": "3", "system_prompt": "s", "category": "x"}
    assert contents(dolly) == [("system", "s"), ("user", "Add.\n1 2"), ("assistant", "3")]


@pytest.mark.parametrize("key", ["weight", "loss", "loss_mask", "trainable", "train", "train_on_turn"])
def test_flags_of_messages_exclude_and_include(key):
    turns = [{**EXPECTED[0], key: False}, EXPECTED[1], {**EXPECTED[4], key: 0}, EXPECTED[1], {**EXPECTED[4], key: 1}]
    chat = read_row({"messages": turns, "system": "unused"}, SFTDataConfig())
    assert (chat.excluded, chat.included) == ({0, 2}, {4})
    shifted = read_row({"messages": turns[1:], "system": "be short"}, SFTDataConfig())
    assert shifted.messages == chat.messages and (shifted.excluded, shifted.included) == ({2}, {4})


def test_reasoning_and_other_keys():
    turns = [EXPECTED[1], {"role": "model", "content": "a", "reasoning": "r", "plan": "p", "weight": 1}]
    chat = read_row({"messages": turns, "chat_template_kwargs": '{"enable_thinking": false}'}, SFTDataConfig())
    assert chat.messages[1] == {
        "role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "r", "plan": "p",
    }  # fmt: skip
    assert chat.other_keys == {"plan"} and chat.template_args == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": EXPECTED, "chat_template_kwargs": "x"}, "chat_template_kwargs must be an object"),
        ({"messages": [share("function_call", "[1]")]}, "must contain calls with a `name`"),
        ({"messages": [openai("[1]")]}, "arguments of the call of weather must be an object"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}, "calls with a `name`"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content must be text, not dict"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "history must be a list of pairs"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, r"messages\[0\]: .*'audio'"),
        ({"messages": [{"role": "user", "content": [None]}]}, r"messages\[0\]: .* None in place of a part"),
        ({"messages": [{"role": "user", "content": [{"text": {"value": "a"}}]}]}, "a text of the type 'dict'"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, "but one is '5'"),
        ({"messages": [openai({"n": float("nan")})]}, r"messages\[0\].tool_calls is not JSON"),
        ({"messages": [openai('{"n": "\\ud800"}')]}, "half of a surrogate pair"),
        ({"messages": EXPECTED, "tools": 5}, "tools must be a list"),
        ({"messages": EXPECTED, "tools": [{"type": "function", "function": 5}]}, "tools must be a list"),
        ({"messages": EXPECTED, "tools": [{"type": "function", "function": {"x": 1}}]}, "a tool needs a `name`"),
        ({"messages": [{"role": "user", "content": "<image>a"}], "images": ["a.png"]}, "the column 'images'"),
        ({"query": "a", "answers": ["b", "c"]}, "must both be text or both lists of messages, not text and a list"),
        ({"messages": EXPECTED[1:], "system": 5}, "system must be text, not int"),
        ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "input must be text, not dict"),
    ],
)
def test_invalid_conversation_raises_one_line(row, match):
    with pytest.raises(RowError, match=match):
        read_row(row, SFTDataConfig())


def contents(row, **options):
    return [(m["role"], m["content"]) for m in read_row(row, SFTDataConfig(**options)).messages]


def test_rows_of_several_forms_in_one_table():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    filled = {"messages": None, "prompt": "q", "completion": "a", "system": "s"}
    assert read_row(filled, SFTDataConfig()) == PromptCompletion("q", "a") and unread(filled) == ["system"]
    assert contents({"messages": turns, "prompt": None, "completion": ""}) == [("user", "q"), ("assistant", "a")]
    as_text = {"prompt": json.dumps(turns[:1]), "completion": json.dumps(turns[1:])}
    assert contents(as_text) == [("user", "q"), ("assistant", "a")]
    assert read_row({"prompt": "[1]", "completion": "[2]"}, SFTDataConfig()) == PromptCompletion("[1]", "[2]")
    named = {"instruction": "q", "input": "i", "output": "a"}
    options = {"prompt_column": "instruction", "completion_column": "output"}
    assert unread(named, **options) == ["input"] and unread(named) == []


def test_xlam_answers_of_other_kinds():
    row = {"query": "q", "tools": json.dumps([TOOL["function"]])}
    assert contents({**row, "answers": "[]"}) == [("user", "q")]
    assert contents({**row, "answers": "I cannot"}) == [("user", "q"), ("assistant", "I cannot")]
    (_, answer) = read_row({**row, "answers": TEXT}, SFTDataConfig()).messages
    assert answer["tool_calls"][0]["function"]["name"] == "weather"
    calls = {"instruction": "q", "input": "i", "output": f"[{TEXT}]", "tools": [TOOL]}
    assert contents(calls) == [("user", "q\ni"), ("assistant", "")]


@pytest.mark.parametrize(
    "tools",
    [
        TOOL, [json.dumps(TOOL)], [{"type": "function", "function": json.dumps(TOOL["function"])}], [TOOL["function"]],
        [{"type": "function", "function": {**TOOL["function"], "parameters": json.dumps(SCHEMA)}}],
        [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
    ],
)  # fmt: skip
def test_tool_definitions_of_other_forms(tools):
    assert read_row({"messages": EXPECTED, "tools": tools}, SFTDataConfig()).tools == [TOOL]


def test_none_that_a_table_added_to_json_is_removed():
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": None}}}
    call = {"function": {"name": "f", "arguments": {"a": None, "b": None}}}
    turns = [EXPECTED[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat = read_row({"messages": turns, "tools": [{"type": "function", "function": function}]}, SFTDataConfig())
    assert chat.tools[0]["function"]["parameters"]["properties"] == {"a": {"type": "string"}}
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_contents_that_are_empty_or_no_call():
    turns = [
        share("function_call", "<tool_call>x</tool_call>"), {"role": "tool", "content": None},
        {"role": "assistant", "reasoning_content": "r"}, {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": [{"text": "a"}, {"type": "text", "text": None}]},
    ]  # fmt: skip
    assert [text for _, text in contents({"messages": turns})] == ["<tool_call>x</tool_call>", "", "", "no", "a\n"]
