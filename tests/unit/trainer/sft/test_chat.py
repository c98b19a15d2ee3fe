"""Rendering learns exactly the tokens that the model would generate after its prompt."""

import numpy as np
import pytest

from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.data.chat_rendering import RowError, encode_example
from tests.support.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def encode(example, tokenizer, **options):
    return encode_example(example, tokenizer, SFTDataConfig(**options))


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


def test_prompt_tokens_equal_those_of_sampling(tokenizer):
    (sequence,) = encode({"messages": CHAT}, tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert sequence.tokens[: len(prompt)].tolist() == prompt
    assert not sequence.loss_mask[: len(prompt)].any()
    assert sequence.loss_mask[len(prompt)]


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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
        (THINKING_STRIPPED.replace("{{ m['content'] }}", "{{ m['content'][:1] }}"), {"user": True}, "data.loss_mask"),
        (None, {}, "no chat template"),
    ],
)
def test_template_with_ambiguous_tokens_raises(template, mask, match):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=match):
        encode({"messages": CHAT}, tokenizer, loss_mask=mask)


def test_error_of_template_is_reported():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match="roles must alternate"):
        encode({"messages": CHAT}, tokenizer)


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
        ({"messages": CHAT, "tools": "x"}, "the chat template rejects the messages: Tools should"),
        ({"messages": CHAT, "tools": [1]}, "the chat template rejects the messages: Tools should"),
        ({"prompt": "x", "completion": "\ud800"}, "half of a surrogate pair"),
        ({"messages": [message("user", "\udfff"), message("assistant", "x")]}, "half of a surrogate pair"),
    ],
)
def test_invalid_columns_raise_one_line(tokenizer, example, match):
    with pytest.raises(RowError, match=match):
        encode(example, tokenizer)


def test_none_in_a_message_is_ignored(tokenizer):
    padded = [{**m, "tool_calls": None, "name": None} for m in CHAT]
    (sequence,) = encode({"messages": padded, "tools": None}, tokenizer)
    (plain,) = encode({"messages": CHAT}, tokenizer)
    assert (sequence.tokens == plain.tokens).all()
