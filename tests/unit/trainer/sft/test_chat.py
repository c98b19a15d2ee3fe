"""Rendering learns exactly the tokens that the model would generate after its prompt."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.rendering.conversations import RowError
from prime_rl.trainer.data.chat_rendering import ExampleEncoder, show_sequence
from tests.support.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def encode(example, tokenizer, **options):
    return ExampleEncoder(tokenizer, SFTDataConfig(**options)).encode(example)


def learned(sequence, tokenizer):
    """The learned stretches as text."""
    edges = np.flatnonzero(np.diff(sequence.loss_mask, prepend=False, append=False))
    return [tokenizer.decode(sequence.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def message(role, content):
    return {"role": role, "content": content}


CHAT = [
    message("system", "be kind"),
    message("user", "hi"),
    message("assistant", "hello"),
    message("user", "and?"),
    message("assistant", "bye "),
]


def test_loss_mask_covers_assistant_tokens_and_end_only(tokenizer):
    (sequence,) = encode({"messages": CHAT}, tokenizer)
    assert learned(sequence, tokenizer) == ["hello<|im_end|>", "bye <|im_end|>"]
    assert tokenizer.decode(sequence.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert sequence.tokens[: len(prompt)].tolist() == prompt, "as in sampling"
    assert sequence.loss_mask[len(prompt)] and not sequence.loss_mask[: len(prompt)].any()
    padded = [{**m, "tool_calls": None, "name": None} for m in CHAT]
    (same,) = encode({"messages": padded, "tools": None}, tokenizer)
    assert (same.tokens == sequence.tokens).all(), "None is ignored"


@pytest.mark.parametrize(
    ("mask", "stretches"),
    [
        ({"user": True, "assistant": False}, ["hi<|im_end|>", "and?<|im_end|>"]),
        ({"system": True, "assistant": False}, ["be kind<|im_end|>"]),
        ({"system": True, "user": True}, ["be kind<|im_end|>", "hi<|im_end|>", "hello<|im_end|>",
                                          "and?<|im_end|>", "bye <|im_end|>"]),
        ({"tool": True}, ["hello<|im_end|>", "bye <|im_end|>"]),
    ],
)  # fmt: skip
def test_loss_mask_can_include_other_roles(tokenizer, mask, stretches):
    (sequence,) = encode({"messages": CHAT}, tokenizer, loss_mask=mask)
    assert learned(sequence, tokenizer) == stretches
    (plain,) = encode({"messages": CHAT}, tokenizer)
    length = min(len(sequence), len(plain))
    assert (sequence.tokens[:length] == plain.tokens[:length]).all(), "what is learned changes no token"


def test_assistant_turns_last_learns_last_turn_only(tokenizer):
    (sequence,) = encode({"messages": CHAT}, tokenizer, assistant_turns="last")
    assert learned(sequence, tokenizer) == ["bye <|im_end|>"]
    (sequence,) = encode({"messages": CHAT}, tokenizer, assistant_turns="last", loss_mask={"user": True})
    assert learned(sequence, tokenizer) == ["hi<|im_end|>", "and?<|im_end|>", "bye <|im_end|>"]


def test_loss_mask_includes_unanswered_message(tokenizer):
    (sequence,) = encode({"messages": CHAT[:4]}, tokenizer, loss_mask={"user": True})
    assert learned(sequence, tokenizer) == ["hi<|im_end|>", "hello<|im_end|>", "and?<|im_end|>"]
    assert encode({"messages": CHAT[:2]}, tokenizer) == []
    weighted = [CHAT[1], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
    (sequence,) = encode({"messages": weighted}, tokenizer)
    assert learned(sequence, tokenizer) == ["bye <|im_end|>"], "weight 0 is not learned"


def call(name, arguments):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_loss_mask_can_include_tool_results(tokenizer):
    chat = [
        message("user", "1+1"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "two"},
        {"role": "tool", "content": "zwei"},
        message("assistant", "it is two"),
    ]
    (sequence,) = encode({"messages": chat, "tools": TOOLS}, tokenizer, loss_mask={"tool": True, "assistant": False})
    assert [stretch.removesuffix("<|im_end|>") for stretch in learned(sequence, tokenizer)] == ["two", "zwei"]
    (sequence,) = encode({"messages": chat, "tools": TOOLS}, tokenizer)
    call, answer = learned(sequence, tokenizer)
    assert "add" in call and call.endswith("<|im_end|>") and answer == "it is two<|im_end|>"


def bpe_tokenizer():
    """A byte-pair tokenizer that merges across the border of a turn's header and its content."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(["user\nhi there", "\nhi there", "assistant\nhello you"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = make_tokenizer().chat_template
    return tokenizer


def test_user_tokens_equal_prompt_tokens_if_merged_with_header():
    tokenizer = bpe_tokenizer()
    chat = [message("user", "hi there é"), message("assistant", "hello you")]
    (sequence,) = encode({"messages": chat}, tokenizer, loss_mask={"user": True})
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    assert sequence.tokens[: len(prompt)].tolist() == prompt
    user, assistant = learned(sequence, tokenizer)
    assert assistant == "hello you<|im_end|>"
    assert "hi there é<|im_end|>".endswith(user) and user.endswith("é<|im_end|>")


def test_prompt_completion_learns_completion_only(tokenizer):
    (chat,) = encode({"prompt": CHAT[:4], "completion": CHAT[4:]}, tokenizer)
    assert learned(chat, tokenizer) == ["bye <|im_end|>"]
    (text,) = encode({"prompt": "ab", "completion": "cd"}, tokenizer)
    assert learned(text, tokenizer) == ["cd<|im_end|>"]
    assert len(text) == 5
    (both,) = encode({"prompt": "ab", "completion": "cd"}, tokenizer, loss_mask={"user": True})
    assert learned(both, tokenizer) == ["bcd<|im_end|>"], "the first token has nothing before it"


def test_columns_can_be_renamed(tokenizer):
    row = {"question": "1+1", "answer": "2", "extra": 3}
    (auto,) = encode(row, tokenizer)
    assert learned(auto, tokenizer) == ["2<|im_end|>"]
    (named,) = encode({"q": "1+1", "a": "2"}, tokenizer, prompt_column="q", completion_column="a")
    assert (named.tokens == auto.tokens).all()
    (chat,) = encode(row, tokenizer, as_messages=True)
    turns = [message("user", "1+1"), message("assistant", "2")]
    assert tokenizer.decode(chat.tokens) == tokenizer.apply_chat_template(turns, tokenize=False)
    assert learned(chat, tokenizer) == ["2<|im_end|>"]
    (other,) = encode({"conversation": turns}, tokenizer, messages_column="conversation")
    assert (other.tokens == chat.tokens).all()


THINKING_STRIPPED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('=')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_template_rewriting_history_gives_a_sequence_per_turn():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING_STRIPPED
    chat = [message("user", "q"), message("assistant", "think=a"), message("user", "r"), message("assistant", "so=b")]
    first, second = encode({"messages": chat}, tokenizer)
    assert learned(first, tokenizer) == ["think=a<|im_end|>"]
    assert learned(second, tokenizer) == ["so=b<|im_end|>"]
    assert "think" not in tokenizer.decode(second.tokens)
    assert "\na<|im_end|>" in tokenizer.decode(second.tokens)
    first, second = encode({"messages": chat}, tokenizer, loss_mask={"user": True})
    assert learned(first, tokenizer) == ["q<|im_end|>", "think=a<|im_end|>"]
    assert learned(second, tokenizer) == ["r<|im_end|>", "so=b<|im_end|>"], "each message is learned once"


@pytest.mark.parametrize(
    ("template", "mask", "match"),
    [
        (THINKING_STRIPPED.replace("assistant\n", "assistant\n<think>"), {}, "generation prompt"),
        (THINKING_STRIPPED.replace("{{ m['content'] }}", "{{ m['content'][:1] }}"),
         {"user": True, "assistant": False}, "data.loss_mask"),
        (None, {}, "no chat template"),
    ],
)  # fmt: skip
def test_template_with_ambiguous_tokens_raises(template, mask, match):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises((RowError, ConfigError), match=match):
        encode({"messages": CHAT}, tokenizer, loss_mask=mask)


@pytest.mark.parametrize(
    ("example", "match"),
    [
        ({"text": "x"}, "data.prompt_column"),
        ({"prompt": "x"}, "messages"),
        ({"prompt": "x", "completion": [CHAT[0]]}, "both be text"),
        ({"messages": "x"}, "list of messages, not text"),
        ({"messages": []}, "not an empty list"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] must have a `role`"),
        (
            {"messages": [CHAT[0], {"role": "user", "content": None}]},
            r"messages\[1\].content must be text, not nothing",
        ),
        ({"prompt": "x", "completion": None}, "both be text"),
        ({"messages": CHAT, "tools": "x"}, "tools must be a list of definitions"),
        ({"messages": CHAT, "tools": [1]}, "tools must be a list of definitions"),
        ({"messages": CHAT, "tools": [{"description": "x"}]}, "a tool needs a `name`"),
        ({"messages": [CHAT[0], {**CHAT[2], "weight": 2}]}, r"messages\[1\].weight must be 0 or 1"),
        ({"messages": [CHAT[1], {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [CHAT[1], call("x", "{not json")]}, "arguments of the call of x must be an object"),
        ({"prompt": "x", "completion": "\ud800"}, "half of a surrogate pair"),
        ({"messages": [message("user", "\udfff"), message("assistant", "x")]}, "half of a surrogate pair"),
    ],
)
def test_invalid_columns_raise_one_line(tokenizer, example, match):
    with pytest.raises(RowError, match=match):
        encode(example, tokenizer)


def test_template_that_drops_calls_is_refused_and_other_losses_are_named_once(tokenizer, said):
    plain = make_tokenizer()
    plain.chat_template = THINKING_STRIPPED
    with pytest.raises(RowError, match="does not render the tool_calls of message 1"):
        encode({"messages": [CHAT[1], call("add", '{"a": 1}')]}, plain)
    empty = THINKING_STRIPPED.replace("{{ m['content'] }}", "{{ m['role'][:0] }}")
    plain.chat_template = empty
    with pytest.raises(RowError, match="does not render the content of message 1"):
        encode({"messages": CHAT[1:3]}, plain)
    plain.chat_template = THINKING_STRIPPED
    encoder = ExampleEncoder(plain, SFTDataConfig())
    chat = [CHAT[1], {**CHAT[2], "reasoning_content": "because", "plan": "p"}, {"role": "narrator", "content": "x"}]
    for number in (1, 2):
        encoder.encode({"messages": chat, "tools": TOOLS, "id": 1}, f"a.jsonl:{number}")
    assert all(line.startswith("a.jsonl:1: ") for line in said())
    for part in (
        "reasoning_content of message 1",
        "definitions of `tools`",
        "key 'plan'",
        "role 'narrator'",
        "not read: id;",
    ):
        assert sum(part in line for line in said()) == 1, part


def test_complete_rendering_warns_of_nothing(tokenizer, said):
    chat = [CHAT[1], call("add", {"note": 'say "hi"\nand <b>', "n": 1}), {"role": "tool", "content": "2"}, CHAT[4]]
    encode({"messages": chat, "tools": TOOLS}, tokenizer)
    assert said() == []


TURNS_END_WITH_NEXT_ROLE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_marker_of_next_turn_is_the_end_of_a_turn(tokenizer, said):
    glm = make_tokenizer()
    glm.chat_template = TURNS_END_WITH_NEXT_ROLE
    (sequence,) = encode({"messages": CHAT}, glm)
    assert learned(sequence, glm) == ["hello<|im_start|>", "bye <|im_start|>"]
    assert glm.decode(sequence.tokens) == glm.apply_chat_template(CHAT, tokenize=False) + "<|im_start|>"
    assert said() == []
    glm.chat_template = TURNS_END_WITH_NEXT_ROLE.replace("<|im_start|>", "#")
    (sequence,) = encode({"messages": CHAT}, glm)
    assert learned(sequence, glm) == ["hello", "bye "]
    assert ["learn to stop" in line for line in said()] == [True]


def test_marker_of_next_turn_ends_a_turn_whose_reasoning_is_dropped(tokenizer, said):
    glm = make_tokenizer()
    thought = "{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }} {% endif %}"
    glm.chat_template = TURNS_END_WITH_NEXT_ROLE.replace("'\n' + m['c", f"'\n' }}}}{thought}{{{{ m['c")
    turns = [{**m, "reasoning_content": "why"} if m["role"] == "assistant" else m for m in CHAT]
    sequences = encode({"messages": turns}, glm)
    assert [learned(one, glm) for one in sequences] == [["why hello<|im_start|>"], ["why bye <|im_start|>"]]
    assert said() == []


def test_special_token_in_a_message_is_named_once(tokenizer, said):
    encoder = ExampleEncoder(tokenizer, SFTDataConfig())
    for number in (1, 2):
        encoder.encode({"messages": [CHAT[1], message("assistant", "a<|im_end|>")]}, f"a.jsonl:{number}")
    assert said() == ["a.jsonl:1: message 1 contains '<|im_end|>', which becomes a special token"]


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": ""}, {"messages": [CHAT[1], message("assistant", "")]}])
def test_empty_answer_learns_its_end_and_is_named_once(tokenizer, said, row):
    encoder = ExampleEncoder(tokenizer, SFTDataConfig())
    for number in (1, 2):
        (sequence,) = encoder.encode(row, f"a.jsonl:{number}")
        assert learned(sequence, tokenizer) == ["<|im_end|>"]
    (line,) = said()
    assert line.startswith("a.jsonl:1: ") and "is empty, so only its end is trained on" in line


def sentencepiece_tokenizer(prepend, bos=False):
    """A byte-pair tokenizer that begins texts with a space, as those of Llama 2 and Mistral."""
    letters = ["<s>", "</s>", "[INST]", "[/INST]", *"▁abcdefghij", "▁ab", "cd", "bc"]
    merges = [("▁", "a"), ("▁a", "b"), ("c", "d"), ("b", "c")]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, "▁a"])}, merges))
    if prepend:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        core.decoder = decoders.Metaspace(prepend_scheme="always")
    core.add_special_tokens(letters[:4])
    if bos:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize(("prompt", "completion"), [("ab", "cd"), ("a", "bcd"), ("ab ", "cd"), ("ab", " cd")])
def test_text_has_the_tokens_of_the_whole_text(prepend, prompt, completion):
    tokenizer = sentencepiece_tokenizer(prepend)
    (sequence,) = encode({"prompt": prompt, "completion": completion}, tokenizer)
    assert sequence.tokens.tolist() == [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
    assert learned(sequence, tokenizer)[0].endswith("cd</s>") and learned(sequence, tokenizer)[0] != "abcd</s>"


def test_slow_tokenizer_that_adds_a_space_to_each_piece_is_refused(monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    tokenizer = sentencepiece_tokenizer(True)
    with pytest.raises(ConfigError, match="changes 'abcd' to 'ab cd'; it needs a fast tokenizer"):
        encode({"prompt": "ab", "completion": "cd"}, tokenizer)
    (sequence,) = encode({"prompt": "ab</s>", "completion": "cd"}, sentencepiece_tokenizer(False))
    assert learned(sequence, tokenizer) == ["cd</s>"]


def test_text_gets_the_special_tokens_that_the_tokenizer_adds():
    for bos in (False, True):
        tokenizer = sentencepiece_tokenizer(True, bos)
        for prompt, completion in (("ab", "cd"), ("ab", "cd</s>"), ("<s>ab", "cd")):
            (sequence,) = encode({"prompt": prompt, "completion": completion}, tokenizer)
            text = tokenizer(prompt + completion.removesuffix("</s>"))["input_ids"]
            assert sequence.tokens.tolist() == [*text, tokenizer.eos_token_id]
            assert not sequence.loss_mask[: len(tokenizer(prompt)["input_ids"])].any()


def test_chat_has_the_tokens_of_the_whole_text():
    tokenizer = sentencepiece_tokenizer(True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST]{{ m['content'] }}[/INST]"
        "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    chat = [message("user", "ab"), message("assistant", "cd ab"), message("user", "c"), message("assistant", "ab")]
    (sequence,) = encode({"messages": chat}, tokenizer)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert sequence.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [part.strip() for part in learned(sequence, tokenizer)] == ["cd ab</s>", "ab</s>"]
    assert show_sequence(sequence, tokenizer).count("«") == 2


def test_first_message_of_the_assistant_is_not_learned(tokenizer, said):
    (sequence,) = encode({"messages": [CHAT[2], *CHAT[3:]]}, tokenizer)
    assert learned(sequence, tokenizer) == ["bye <|im_end|>"] and "has no prompt" in said()[0]
    assert encode({"messages": [CHAT[2]]}, tokenizer) == []


@pytest.mark.parametrize(
    "shown",
    [
        "{% for c in m.tool_calls %}#{{ c.function.name + c.function.arguments }}{% endfor %}{{ m.content or '' }}",
        "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments | string }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}",
    ],
)
def test_template_that_reads_arguments_as_text(shown):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING_STRIPPED.replace("{{ m['content'] }}", shown)
    encoder = ExampleEncoder(tokenizer, SFTDataConfig())
    for _ in range(2):
        (sequence,) = encoder.encode({"messages": [CHAT[1], call("add", {"a": 1})]})
        assert 'add{"a": 1}<|im_end|>' in learned(sequence, tokenizer)[0]
    (plain,) = encoder.encode({"messages": CHAT[1:3]})
    assert learned(plain, tokenizer) == ["hello<|im_end|>"]


def test_end_of_the_whole_text_is_not_learned():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template + "{% if not add_generation_prompt %}<unk>{% endif %}"
    (sequence,) = encode({"messages": CHAT}, tokenizer)
    assert learned(sequence, tokenizer) == ["hello<|im_end|>", "bye <|im_end|>"]
    assert tokenizer.decode(sequence.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("content", ["hello", "  two  spaces "])
def test_special_token_that_takes_white_space_is_learned(content):
    tokenizer = make_tokenizer()
    core = tokenizer.backend_tokenizer
    core.add_special_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = make_tokenizer().chat_template.replace("<|im_end|>", "<|end|>")
    (sequence,) = encode({"messages": [CHAT[1], message("assistant", content)]}, tokenizer)
    (text,) = learned(sequence, tokenizer)
    assert text.endswith("<|end|>") and content.strip() in text and "assistant" not in text


def test_space_of_the_prompt_is_not_learned_if_offsets_omit_it():
    core = Tokenizer(models.BPE({**{c: i for i, c in enumerate("Answer:Ġ42")}, "Ġ4": 20, "<|end|>": 21}, [("Ġ", "4")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    core.decoder, core.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    (sequence,) = encode({"prompt": "Answer: ", "completion": "42 "}, tokenizer)
    assert learned(sequence, tokenizer) == ["42 <|end|>"]


def test_prompt_that_changes_once_it_is_answered_is_that_of_sampling():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}"
        "{{ m.content }}<unk>"
        "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    first, second = encode({"messages": CHAT}, tokenizer)
    decoded = [tokenizer.decode(sequence.tokens) for sequence in (first, second)]
    assert decoded[0] == "<|im_start|>be kind hi<unk> hello<|im_end|>"
    assert decoded[1] == "<|im_start|>hi<unk> hello<|im_end|><|im_start|>be kind and?<unk> bye <|im_end|>"
    assert [learned(one, tokenizer)[0].strip() for one in (first, second)] == ["hello<|im_end|>", "bye <|im_end|>"]


@pytest.mark.parametrize("thinking", [None, "because"])
def test_last_turn_that_ends_with_another_token_keeps_it(thinking):
    """As of gpt-oss, which also drops the thinking of earlier turns."""
    core = make_tokenizer().backend_tokenizer
    core.add_special_tokens([AddedToken(name, special=True) for name in ("<|to|>", "<|return|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|return|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "{% if loop.last and m.thinking %}<|to|>self {{ m.thinking }}<|im_end|><|im_start|>assistant{% endif %}"
        "<|to|>user {{ m.content }}{{ '<|return|>' if loop.last else '<|im_end|>' }}"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    more = {"reasoning_content": thinking} if thinking else {}
    sequences = encode({"messages": [CHAT[1], {**CHAT[2], **more}, CHAT[3], CHAT[4]]}, tokenizer)
    first = "<|to|>self because<|im_end|><|im_start|>assistant" if thinking else ""
    assert [learned(one, tokenizer) for one in sequences] == [
        [f"{first}<|to|>user hello<|return|>"], ["<|to|>user bye <|return|>"],
    ]  # fmt: skip
