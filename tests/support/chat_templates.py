"""Common kinds of chat templates, with tokenizers that merge, for tests of rendering."""

from dataclasses import dataclass
from typing import Any

CHATML = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# The conventions of Qwen 2.5 and 3: tools in the system message, results in a user's turn, and reasoning that is
# dropped after the next message of the user.
TOOLS = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools or system -%}
<|im_start|>system
{{ system }}
{%- if tools %}
{{ '\\n\\n' if system }}# Tools
{% for tool in tools %}
{{ tool.function | tojson }}
{%- endfor %}

To call one: <tool_call>
{"name": ..., "arguments": {...}}
</tool_call>
{%- endif %}<|im_end|>
{% endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif -%}
{%- elif m.role == 'assistant' -%}
{%- set content = m.content -%}
{%- set thought = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>assistant
{% if thought and loop.index0 > ns.asked %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n' if content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# Start token, trimmed contents, the date in the system message, calls as bare JSON.
LLAMA3 = """\
<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Today is {{ date or strftime_now('%d %b %Y') }}.
{% for tool in tools or [] %}
{{ tool | tojson }}
{% endfor -%}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls -%}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('only one call is possible') }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>

{% set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

# No header before an answer, strict alternation, calls after a special token, ids of nine characters.
MISTRAL = """\
<s>
{%- set ns = namespace(turn=0) -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}
{%- if ns.turn % 2 %}{{ raise_exception('roles have to alternate') }}{% endif -%}
{%- set ns.turn = ns.turn + 1 -%}
[INST] {% if messages[0].role == 'system' and ns.turn == 1 %}{{ messages[0].content }}

{% endif %}{{ m.content }}[/INST]
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('the id of a call has nine characters') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls -%}
[TOOL_CALLS] [
{%- for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last -}}
{%- endfor -%}
]</s>
{%- else -%}
{%- set ns.turn = ns.turn + 1 -%}
{{ ' ' + m.content | trim }}</s>
{%- endif -%}
{%- endfor -%}"""

# The end of a turn is not a special token.
PLAIN = """\
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@dataclass(frozen=True)
class Shape:
    """A template, its special tokens (the first ends a turn), and the parser of its tool calls."""

    template: str
    special: tuple[str, ...]
    parser: str = "hermes"


SHAPES = {
    "chatml": Shape(CHATML, ("<|im_end|>", "<|im_start|>", "<|endoftext|>")),
    "tools": Shape(TOOLS, ("<|im_end|>", "<|im_start|>", "<|endoftext|>")),
    "llama3": Shape(
        LLAMA3,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        "llama3_json",
    ),
    "mistral": Shape(
        MISTRAL, ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), "mistral"
    ),
    "plain": Shape(PLAIN, ("<eos>",)),
}


def make_merging_tokenizer(shape: Shape) -> Any:
    """Make a byte-level tokenizer with a few hundred merges: texts have many tokenisations, one of them canonical."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = [part.template for part in SHAPES.values()] + ["the quick brown fox adds two and two to the answer"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(shape.special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=shape.special[0],
        extra_special_tokens=list(shape.special[1:]),
        clean_up_tokenization_spaces=False,
        chat_template=shape.template,
    )
