"""Tool calls as the templates of models write them: the package `renderers` has these templates as code."""

import importlib
import json
import re
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.configs.rendering import RenderingConfig
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.completion_parsers import (
    MAX_CALLS,
    PARSERS,
    deepseek_v3,
    glm45,
    gpt_oss,
    kimi_k2,
    mistral,
    parser_of_template,
)
from prime_rl.rollouts.rendering.messages import Generation, Parsed, ToolCall, normalise
from prime_rl.rollouts.rendering.renderer import Renderer
from tests.support.chat_templates import SHAPES

PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "filter": {"type": "object"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "hour": {"type": ["integer", "null"]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"properties": PROPERTIES}}}]
ARGUMENTS = [
    {"city": ' a <b> \n"x" é', "days": 3, "filter": {"x": [1, None, True]}},
    {"city": "7", "unit": "12", "hour": None},
]
IDS = ("functions.get_time:0", "functions.get_time:1")


def deepseek(*names):
    return tuple(f"<｜{name}｜>" for name in names)


GLM = (
    "<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>",
    "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
KIMI = (
    "<|im_end|>", "<|im_assistant|>", "<|im_middle|>", "<|im_system|>", "<|im_user|>", "<|tool_call_argument_begin|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
)  # fmt: skip
DEEPSEEK_V3 = deepseek(
    "end▁of▁sentence", "begin▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end",
    "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin",
    "tool▁output▁end",
)  # fmt: skip
DEEPSEEK_V4 = (
    *deepseek("end▁of▁sentence", "begin▁of▁sentence", "User", "Assistant", "latest_reminder", "action", "authority"),
    *deepseek("domain", "query", "read_url", "title"), "<think>", "</think>", "｜DSML｜", "<tool_result>",
    "</tool_result>",
)  # fmt: skip
MINIMAX = ("[e~[", "]~!b[", "]~b]", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
QWEN = (
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip
MODELS = {  # parser, module of `renderers`, class, special tokens of which the first ends a turn
    "GLM-4.5": ("glm45", "glm45", "GLM45Renderer", GLM),
    "GLM-5": ("glm45", "glm5", "GLM5Renderer", GLM),
    "Kimi-K2": ("kimi_k2", "kimi_k2", "KimiK2Renderer", KIMI),
    "DeepSeek-V3": ("deepseek_v3", "deepseek_v3", "DeepSeekV3Renderer", DEEPSEEK_V3),
    "DeepSeek-V4": ("deepseek_v3", "deepseek_v4", "DeepSeekV4Renderer", DEEPSEEK_V4),
    "MiniMax-M2": ("minimax_m2", "minimax_m2", "MiniMaxM2Renderer", MINIMAX),
    "Qwen3.5": ("qwen3_coder", "qwen35", "Qwen35Renderer", QWEN),
}


def make_byte_tokenizer(special):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], extra_special_tokens=list(special[1:]))


@pytest.mark.parametrize("model", MODELS)
def test_calls_as_the_template_writes_them_are_parsed(model):
    parser, module, kind, special = MODELS[model]
    tokenizer = make_byte_tokenizer(special)
    renderer = getattr(importlib.import_module(f"renderers.{module}"), kind)(tokenizer)
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_time", "arguments": arguments}}
        for name, arguments in zip(IDS, ARGUMENTS, strict=True)
    ]
    answer = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls}
    question = {"role": "user", "content": "q"}

    def render(messages, **more):
        return tokenizer.decode(renderer.render_ids(messages, tools=TOOLS, **more), skip_special_tokens=False)

    prompt, text = render([question], add_generation_prompt=True), render([question, answer])
    assert text.startswith(prompt)
    completion = re.sub(re.escape(special[0]) + r"\s*$", "", text[len(prompt) :])
    completion = completion.rpartition("</think>")[2].lstrip("\n")
    parsed = PARSERS[parser](completion, TOOLS)
    names = IDS if model == "Kimi-K2" else ("", "")
    written = [json.dumps(arguments, ensure_ascii=False) for arguments in ARGUMENTS]
    wanted = tuple(ToolCall("get_time", text, name) for text, name in zip(written, names, strict=True))
    assert parsed == Parsed("so", wanted)


def test_other_forms_of_deepseek_are_parsed():
    body = '<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"city": "x"}<｜tool▁call▁end｜>'
    call = ToolCall("get_time", '{"city": "x"}')
    section = f"so<｜tool▁calls▁begin｜>{body}{body}<｜tool▁calls▁end｜>"
    assert deepseek_v3(section) == Parsed("so", (call, call))
    assert deepseek_v3(section.removesuffix("<｜tool▁calls▁end｜>")) == Parsed("so", (call, call))
    value = '<｜DSML｜parameter name="city" string="true">x</｜DSML｜parameter>'
    element = f'<｜DSML｜invoke name="get_time">{value}</｜DSML｜invoke>'
    assert deepseek_v3(f"so<｜DSML｜function_calls>\n{element}\n</｜DSML｜function_calls>") == Parsed("so", (call,))
    for broken in (
        section.replace("sep", "set"),
        section.replace('"x"}', '"x"'),
        f"<｜DSML｜function_calls>{element} x",
    ):
        assert deepseek_v3(broken) == Parsed(broken)


def test_messages_of_gpt_oss_are_separated():
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    said = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    head = "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>"
    other = "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>"
    call = ToolCall("get_time", '{"city": "x"}')
    body = '{"city": "x"}'
    assert gpt_oss(f"{thought}{said}{head}{body}<|call|>{other}{body}", TOOLS) == Parsed("I look.", (call, call), "hm")
    assert gpt_oss(f"{thought}{head}{body}") == Parsed(body, (), "hm")  # no tools are offered
    assert gpt_oss(f"{thought}{head}{body} so", TOOLS) == Parsed(f"{body} so", (), "hm")
    assert gpt_oss(f"{thought}<|start|>assistant<|channel|>final<|message|>4") == Parsed("4", (), "hm")
    assert gpt_oss("<|channel|>analysis<|message|>hm") == Parsed("", (), "hm")
    assert gpt_oss("four") == Parsed("four")
    assert gpt_oss("<|channel|>final") == Parsed("")
    assert gpt_oss(head, TOOLS).calls == (ToolCall("get_time", "{}"),)


@pytest.mark.parametrize("name", ["functions.get_time:0", "get_time:0", "functions.get_time"])
def test_id_of_kimi_is_kept_if_it_has_a_number(name):
    text = f"<|tool_calls_section_begin|><|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert kimi_k2(text).calls == (ToolCall("get_time", "{}", name if ":" in name else ""),)


def test_ids_of_mistral_are_kept():
    named = '[TOOL_CALLS]get_time[CALL_ID]abc123def[ARGS]{"city": "x"}[TOOL_CALLS]get_time[ARGS]{}'
    assert mistral(named).calls == (
        ToolCall("get_time", '{"city": "x"}', "abc123def"),
        ToolCall("get_time", "{}"),
    )
    (call,) = mistral('[TOOL_CALLS][{"name": "get_time", "arguments": {}, "id": "abcdefghi"}]').calls
    assert call.id == "abcdefghi"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_ti",
        "tags: <tool_call> and",
        "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n",
        "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>x",
    ],
)
def test_cut_call_of_glm_stays_content(text):
    assert glm45(text) == Parsed(text)


def test_call_ends_the_reasoning():
    tokenizer = make_byte_tokenizer(QWEN)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call><function=<think>\n"
    renderer = Renderer(tokenizer, RenderingConfig(reasoning_parser="think"))
    text = "I need it.\n<tool_call>\n<function=get_time>\n</function>\n</tool_call><|im_end|>"
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    made = Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), False)
    parsed = renderer.parse(renderer.render_prompt([{"role": "user", "content": "q"}]), made, TOOLS)
    assert parsed == Parsed("", (ToolCall("get_time", "{}"),), "I need it.")


def test_template_without_a_known_format_is_reported_once(said):
    tokenizer = make_byte_tokenizer(("<|im_end|>",))
    tokenizer.chat_template = SHAPES["chatml"].template
    renderer, ids = Renderer(tokenizer), np.array([5, 0], np.int32)
    made = Generation(ids, np.zeros(2, np.float32), np.zeros(2, np.int32), False)
    prompt = renderer.render_prompt([{"role": "user", "content": "q"}])
    renderer.parse(prompt, made)
    assert said() == []
    for _ in range(2):
        renderer.parse(prompt, made, TOOLS)
    (line,) = said()
    assert "set rendering.tool_call_parser" in line


@pytest.mark.parametrize(
    "parameters",
    [
        "x",
        {"properties": ["a"]},
        *({"properties": {"a": schema}} for schema in ({"type": None}, {"type": 5}, {"type": [{}]}, {"anyOf": 3}, 7)),
    ],
)
def test_odd_schemas_leave_values_as_text(parameters):
    tools = [{"function": {"name": ["f"]}}, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (call,) = glm45("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", tools).calls
    assert json.loads(call.arguments) == {"a": "1"}


@pytest.mark.parametrize(
    ("value", "schema", "result"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "12"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("true", {"type": ["string", "number"]}, "true"),
        ('{"a": 1}', {"$ref": "#/$defs/Point"}, {"a": 1}),
        ("1", {"$ref": "#/$defs/Color"}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("[1]", {"type": "array"}, [1]),
        ("three", {"type": "integer"}, "three"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        (" x ", {"type": "string"}, " x "),
    ],
)
def test_value_has_the_type_of_the_schema(value, schema, result):
    definitions = {"Point": {"type": "object"}, "Color": {"type": "string", "enum": ["1"]}}
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (call,) = glm45(f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>", tools).calls
    assert json.loads(call.arguments) == {"a": result}


def test_number_of_calls_in_a_block_is_limited():
    call = '<invoke name="f"></invoke>'
    for count in (MAX_CALLS, MAX_CALLS + 1):
        text = f"<minimax:tool_call>{call * count}</minimax:tool_call>"
        assert len(PARSERS["minimax_m2"](text, []).calls) == (MAX_CALLS if count == MAX_CALLS else 0)


@pytest.mark.parametrize("name", ["glm45", "kimi_k2", "deepseek_v3", "minimax_m2", "gpt_oss"])
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>f<arg_key>a</arg_key><arg_value>", "<arg_key>a</arg_key><arg_value>", "<tool_call> ", "<|start|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>[", "<｜DSML｜tool_calls>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}", '<minimax:tool_call><invoke name="f">', "to=functions.",
        '<invoke name="f"><parameter name="a">',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f```json{",
        "<|channel|>commentary to=functions.f<|message|>{", '<｜DSML｜invoke name="f">', "<|message|>{}<|end|>",
    ],
)  # fmt: skip
def test_hostile_text_takes_linear_time(name, piece):
    check_time(name, piece * (500_000 // len(piece)))


@pytest.mark.parametrize(
    ("name", "opening", "piece"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=a>", "</parameter><parameter=b>1"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value><arg_key>b</arg_key><arg_value>1"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=b>", "[1, "),
    ],
)
def test_many_openings_before_a_long_text_take_linear_time(name, opening, piece):
    check_time(name, opening * MAX_CALLS + piece * (500_000 // len(piece)))


def check_time(name, text):
    opening = {"kimi_k2": "<|tool_calls_section_begin|>", "minimax_m2": "<minimax:tool_call>"}.get(name, "")
    text = opening + text
    start = time.process_time()
    parsed = PARSERS[name](text, TOOLS)
    assert time.process_time() - start < 5  # quadratic time would be hours
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.calls)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek_v3"),
        ("{{ '<minimax:tool_call>' }}", "minimax_m2"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss"),
        ("<tool_call>\n<function=name>", "qwen3_coder"),
        (SHAPES["tools"].template, "hermes"),
        (SHAPES["llama3"].template, "llama3_json"),
        (SHAPES["mistral"].template, "mistral"),
        ('<|eot_id|><tool_call>{{ call }}</tool_call> "parameters": ', "hermes"),
        ('<|eot|>{"name": {{ name }}, "parameters": ', "llama3_json"),
    ],
)
def test_format_is_found_in_the_template(template, parser):
    tokenizer = make_byte_tokenizer(("<|im_end|>",))
    tokenizer.chat_template = template
    assert Renderer(tokenizer)._parse is parser_of_template(template) is PARSERS[parser]
    assert Renderer(tokenizer, RenderingConfig(tool_call_parser="mistral"))._parse is PARSERS["mistral"]


TURNS = {  # template, special tokens, reply
    "kimi_k2": (
        "{% for m in messages %}<|im_user|>{{ m.tool_call_id or m.role }}<|im_middle|>{% for call in m.tool_calls %}"
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>{% endfor %}{{ m.content }}"
        "<|im_end|>{% endfor %}<|im_assistant|><|im_middle|>",
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>"
        '{"city": "x"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
    ),
    "gpt_oss": (
        "{% for m in messages %}{% for call in m.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}"
        "<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}<|start|>assistant",
        ("<|call|>", "<|return|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|message|>", "<|start|>"),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_time "
        '<|constrain|>json<|message|>{"city": "x"}<|call|>',
    ),
}


@pytest.mark.parametrize("model", TURNS)
async def test_turns_with_calls_are_one_sample(model):
    template, special, reply = TURNS[model]
    tokenizer = make_byte_tokenizer(special)
    tokenizer.chat_template = template
    prompts = []

    class Engine:
        async def generate(self, prompt_ids, sampling):
            prompts.append(tokenizer.decode(prompt_ids, skip_special_tokens=False))
            ids = np.array(tokenizer.encode(reply, add_special_tokens=False), np.int32)
            return Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), False)

    recorder, messages = Recorder(Engine(), Renderer(tokenizer), 10_000), [{"role": "user", "content": "q"}]
    for _ in range(3):
        answered = await recorder.ask(messages, TOOLS, {})
        assert [call.name for call in answered.parsed.calls] == ["get_time"]
        assert answered.parsed.reasoning == ("hm" if model == "gpt_oss" else None)
        (name,) = answered.call_ids
        messages += [answered.message(), {"role": "tool", "tool_call_id": name, "content": "noon"}]
    assert [reply.call_ids[0] for reply in recorder.replies] == {
        "kimi_k2": ["functions.get_time:0", "call00001", "call00002"],  # an id that is repeated names nothing
        "gpt_oss": ["call00000", "call00001", "call00002"],
    }[model]
    assert all(prompts[turn + 1].startswith(prompts[turn] + reply) for turn in range(2))
    rollout = recorder.rollout(dict.fromkeys(recorder.replies, True), normalise(messages), 1.0, {}, False)
    assert len(rollout.samples) == 1
