"""The learned tokens are exactly the assistant's, rows are packed and in an order that the seed fixes."""

import json
from itertools import islice

import numpy as np
import pytest

from prime_rl.configs.sft import SFTDataConfig, SFTFakeDataConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.sft import data
from prime_rl.trainer.sft.chat import TokenSequence, encode_example
from tests.support.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


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


def test_loss_is_on_the_assistant_tokens_and_their_end_only(tokenizer):
    (sequence,) = encode_example({"messages": CHAT}, tokenizer)
    assert learned(sequence, tokenizer) == ["hello<|im_end|>", "bye <|im_end|>"]
    assert tokenizer.decode(sequence.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_prompt_tokens_are_those_of_sampling(tokenizer):
    (sequence,) = encode_example({"messages": CHAT}, tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert sequence.tokens[: len(prompt)].tolist() == prompt
    assert not sequence.loss_mask[: len(prompt)].any()
    assert sequence.loss_mask[len(prompt)]


def test_of_prompt_and_completion_only_the_completion_is_learned(tokenizer):
    (chat,) = encode_example({"prompt": CHAT[:4], "completion": CHAT[4:]}, tokenizer)
    assert learned(chat, tokenizer) == ["bye <|im_end|>"]
    (text,) = encode_example({"prompt": "ab", "completion": "cd"}, tokenizer)
    assert learned(text, tokenizer) == ["cd<|im_end|>"]
    assert len(text) == 5


THINKING_STRIPPED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('=')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_template_that_rewrites_history_gives_a_sequence_per_turn():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING_STRIPPED
    chat = [message("user", "q"), message("assistant", "think=a"), message("user", "r"), message("assistant", "so=b")]
    first, second = encode_example({"messages": chat}, tokenizer)
    assert learned(first, tokenizer) == ["think=a<|im_end|>"]
    assert learned(second, tokenizer) == ["so=b<|im_end|>"]
    assert "think" not in tokenizer.decode(second.tokens)
    assert "\na<|im_end|>" in tokenizer.decode(second.tokens)


def test_template_that_does_not_continue_its_prompt_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING_STRIPPED.replace("assistant\n", "assistant\n<think>")
    with pytest.raises(ConfigError, match="generation prompt"):
        encode_example({"messages": CHAT}, tokenizer)


@pytest.mark.parametrize("example", [{"text": "x"}, {"prompt": "x"}, {"prompt": "x", "completion": [CHAT[0]]}])
def test_other_columns_are_one_line(tokenizer, example):
    with pytest.raises(ConfigError, match="messages"):
        encode_example(example, tokenizer)


def make_sequence(length, value=7):
    return TokenSequence(np.full(length, value, np.int64), np.arange(length) > 0)


def test_packing_keeps_every_sequence_once_and_fills_rows():
    random = np.random.default_rng(0)
    lengths = random.integers(20, 60, 2000)
    sequences = [make_sequence(int(n), i) for i, n in enumerate(lengths)]
    rows = list(data.pack(iter(sequences), 512))
    assert all(sum(map(len, row)) <= 512 for row in rows)
    assert sorted(int(s.tokens[0]) for row in rows for s in row) == list(range(2000))
    assert len(rows) <= 1.03 * -(-lengths.sum() // 512)


def test_packing_does_not_sort_by_length():
    lengths = np.random.default_rng(0).integers(20, 60, 4000)
    rows = list(data.pack((make_sequence(int(n)) for n in lengths), 512))
    means = [np.mean([len(s) for s in row]) for row in rows[:-40]]
    early, late = np.mean(means[: len(means) // 2]), np.mean(means[len(means) // 2 :])
    assert abs(early - late) < 1.0  # sorted, they would differ by 20


def test_order_is_fixed_by_the_seed_and_new_in_each_epoch():
    sequences = [make_sequence(2, i) for i in range(20)]

    def order(seed):
        return [int(s.tokens[0]) for s in data.in_order(sequences, seed, epochs=2)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:20] != order(1)[20:]
    assert sorted(order(1)[:20]) == sorted(order(1)[20:]) == list(range(20))
    assert order(None) == [*range(20)] * 2


def test_long_examples_are_cut_and_those_without_anything_to_learn_left_out(tokenizer):
    long = {"prompt": "a", "completion": "b" * 50}
    hopeless = {"prompt": "a" * 50, "completion": "b"}
    kept = data.encode_all([long, hopeless], tokenizer, 10)
    assert [len(s) for s in kept] == [10]
    with pytest.raises(ConfigError, match="no example"):
        data.encode_all([hopeless], tokenizer, 10)


def test_local_file(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    assert len(data.load_examples(SFTDataConfig(name=str(path)))) == 2
    path.write_text('{"a": 1}\n{oops\n')
    with pytest.raises(ConfigError, match=":2 is not JSON"):
        data.load_examples(SFTDataConfig(name=str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        data.load_examples(SFTDataConfig(name=str(tmp_path / "none.jsonl")))


def test_micro_batch_lays_rows_one_after_the_other():
    rows = [[make_sequence(3), make_sequence(2)], [make_sequence(4)]]
    batch = data.to_micro_batch(rows)
    assert batch.boundaries.tolist() == [0, 3, 5, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.scored.tolist() == [1, 2, 4, 6, 7, 8]
    assert batch.longest == 4


def test_fake_sequences_follow_the_seed():
    fixed = list(islice(data.fake_sequences(SFTFakeDataConfig(seq_len=16), 50), 3))
    assert [len(s) for s in fixed] == [16] * 3
    variable = list(islice(data.fake_sequences(SFTFakeDataConfig(seq_len=16, length="variable"), 50), 20))
    assert len({len(s) for s in variable}) > 3
    again = list(islice(data.fake_sequences(SFTFakeDataConfig(seq_len=16), 50), 3))
    assert all((a.tokens == b.tokens).all() for a, b in zip(fixed, again, strict=True))
