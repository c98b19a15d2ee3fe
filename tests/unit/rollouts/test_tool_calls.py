"""Whatever a model writes: calls are found, nothing else is lost, and no text costs more than linear time."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.rollouts.rendering.completion_parsers import (
    MAX_CALLS,
    PARSERS,
    hermes,
    llama3_json,
    mistral,
    qwen3_coder,
    split_reasoning,
)
from prime_rl.rollouts.rendering.messages import MAX_DEPTH, Parsed, ToolCall

SUM = ToolCall("add", '{"a": 1, "b": {"c": [2]}}')
JSON = '{"name": "add", "arguments": {"a": 1, "b": {"c": [2]}}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{JSON}\n</tool_call>", "", [SUM]),
        (f"<tool_call>{JSON}</tool_call>\n<tool_call>\n{JSON}\n</tool_call>", "", [SUM, SUM]),
        (f"I add.\n<tool_call>{JSON}</tool_call> Done. ", "I add. Done.", [SUM]),
        (f"<tool_call>{JSON}", "", [SUM]),  # the closing tag is forgotten
        (JSON.replace("arguments", "parameters").join(["<tool_call>", "</tool_call>"]), "", [SUM]),
        (
            '<tool_call>{"name": "say", "arguments": {"text": "a </tool_call> b"}}</tool_call>',
            "",
            [ToolCall("say", '{"text": "a </tool_call> b"}')],
        ),
        ('<tool_call>{"name": "é", "arguments": {"☃": "\\u00e9"}}</tool_call>', "", [ToolCall("é", '{"☃": "é"}')]),
    ],
)
def test_hermes(text, content, calls):
    assert hermes(text) == Parsed(content, tuple(calls))


MALFORMED = [
    '{"name": "add", "arguments": {"a": 1}', '{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": "{}"}',
    '{"name": "add"}', '{"name": "", "arguments": {}}', '{"name": 7, "arguments": {}}', '{"arguments": {}}',
    '{"name": "add", "arguments": {"a": NaN}}', '{"name": "add", "arguments": {"a": 1e999}}',
    '{"name": "add", "arguments": {"a": "\\ud800"}}', '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
    '{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "}}",
    '{"name": "add", "arguments": {"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}",
    '{"name": "' + "a" * 300 + '", "arguments": {}}', "{'name': 'add', 'arguments': {}}", "add(1, 2)", "",
    JSON + " and so on",
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:40])
def test_invalid_call_stays_content(body):
    text = f" x <tool_call>{body}</tool_call> y "
    assert hermes(text) == Parsed(text)
    both = hermes(f"{text}<tool_call>{JSON}</tool_call>")
    assert both == Parsed(text.strip(), (SUM,))


def test_nesting_within_the_limit_is_a_call():
    arguments = '{"a": ' + "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2) + "}"
    (call,) = hermes(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>').calls
    assert json.loads(call.arguments) == json.loads(arguments)


def test_number_of_calls_is_limited():
    parsed = hermes(f"<tool_call>{JSON}</tool_call>" * (MAX_CALLS + 3))
    assert len(parsed.calls) == MAX_CALLS
    assert parsed.content == f"<tool_call>{JSON}</tool_call>" * 3


def test_qwen3_coder():
    properties = {"code": {"type": "string"}, "times": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"properties": properties}}}]
    text = (
        "I run it.\n<tool_call>\n<function=run>\n<parameter=code>\nif x < 1:\n    print('</a>')\n</parameter>\n"
        "<parameter=times>\n3\n</parameter>\n<parameter=other>\n4\n</parameter>\n</function>\n</tool_call>"
    )
    arguments = {"code": "if x < 1:\n    print('</a>')", "times": 3, "other": "4"}
    assert qwen3_coder(text, tools) == Parsed("I run it.", (ToolCall("run", json.dumps(arguments)),))
    no_number = text.replace("\n3\n", "\nthree\n")
    assert json.loads(qwen3_coder(no_number, tools).calls[0].arguments)["times"] == "three"
    assert qwen3_coder("<tool_call><function=now></function></tool_call>").calls == (ToolCall("now", "{}"),)
    for broken in (text.replace("</function>", ""), text.replace("</parameter>", ""), text.replace("=run", "")):
        assert qwen3_coder(broken, tools) == Parsed(broken)


def test_llama3_json():
    call = '{"name": "add", "parameters": {"a": 1, "b": {"c": [2]}}}'
    assert llama3_json(f"<|python_tag|>{call}; {call}\n") == Parsed("", (SUM, SUM))
    assert llama3_json(call) == Parsed("", (SUM,))
    for text in (f"{call} so", f"so {call}", "{}", '{"a": 1}', ""):
        assert llama3_json(text) == Parsed(text)


def test_mistral():
    assert mistral(f" [TOOL_CALLS][{JSON}, {JSON}]") == Parsed("", (SUM, SUM))
    assert mistral('so[TOOL_CALLS]add[ARGS]{"a": 1, "b": {"c": [2]}}') == Parsed("so", (SUM,))
    assert mistral("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}").calls == (ToolCall("f", "{}"), ToolCall("g", "{}"))
    for text in (f"[TOOL_CALLS][{JSON}, 1]", f"[TOOL_CALLS][{JSON}] x", "[TOOL_CALLS]", "[TOOL_CALLS][]", "x"):
        assert mistral(text) == Parsed(text)


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\nhm\n</think>\n\nfour", False, ("hm", "four")),
        ("hm</think>four", True, ("hm", "four")),
        ("hm</think>four", False, (None, "hm</think>four")),
        ("<think>hm", False, ("hm", "")),
        ("hm", True, ("hm", "")),
        ("<think></think>", False, ("", "")),
        ("a <think>hm</think>", False, (None, "a <think>hm</think>")),
        ("", False, (None, "")),
    ],
)
def test_reasoning(text, opened, parts):
    assert split_reasoning(text, opened) == parts


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<function=f>", "</function>"]
fragments = st.sampled_from(
    [*MARKERS, "<parameter=p>", "</parameter>", *'{}"\\[],; \né\ud800', JSON, '{"name": "a", "arguments": {']
)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=50)
@given(text=st.lists(fragments, max_size=12).map("".join))
def test_parsers_never_raise_and_calls_are_json_objects(name, text):
    parsed = PARSERS[name](text, [])
    assert all(call.name and isinstance(json.loads(call.arguments), dict) for call in parsed.calls)
    if not parsed.calls:
        assert parsed == Parsed(text)


HOSTILE = [
    "<tool_call>", '<tool_call>{"name": "', '<tool_call>{"a": [1, ', "<tool_call>" + " " * 50,
    "<tool_call><function=f>", "<tool_call><function=f><parameter=p>", "<function=", "[TOOL_CALLS]",
    "[TOOL_CALLS]f[ARGS]{", '[TOOL_CALLS][{"name":', '{"name": "a", "parameters": {}};', "[", '{"a":', '"\\', "<think>",
    " ",
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("prefix", ["", "<tool_call>", "[TOOL_CALLS]", "{"])
@pytest.mark.parametrize("piece", HOSTILE)
def test_parsers_take_linear_time(name, prefix, piece):
    text = prefix + piece * (1_000_000 // len(piece))
    start = time.process_time()
    PARSERS[name](text, [])
    assert time.process_time() - start < 5  # quadratic time would be hours
