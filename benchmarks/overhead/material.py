"""Inputs of the overhead benchmark: a small tokenizer, and an environment with prompts."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ENVIRONMENT = '''
import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def load_environment(prompts):
    """One turn; the reward is a number that differs between answers."""

    def reward(completion, **kwargs):
        return len(completion[-1].content) % 7 / 7

    rows = [{"question": text, "answer": ""} for text in json.loads(Path(prompts).read_text())]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]))
'''

_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def words(count: int, seed: int) -> str:
    """Draw artificial words with a natural distribution."""
    random = np.random.default_rng(seed)
    syllables = [
        "ba",
        "co",
        "di",
        "fu",
        "gra",
        "hel",
        "in",
        "ja",
        "kle",
        "mon",
        "no",
        "pri",
        "qua",
        "re",
        "ster",
        "tion",
    ]
    vocabulary = ["".join(random.choice(syllables, random.integers(1, 4))) for _ in range(5000)]
    ranks = np.minimum(random.zipf(1.3, count), len(vocabulary)) - 1
    return " ".join(vocabulary[rank] for rank in ranks)


def make_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Train byte-level BPE with 4,096 tokens and save it with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([words(50_000, seed=0)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer


def make_prompts(tokenizer: PreTrainedTokenizerFast, tokens: int, count: int = 64) -> list[str]:
    """Draw texts of about `tokens` tokens."""
    return [
        tokenizer.decode(tokenizer(words(tokens, seed=1 + i), add_special_tokens=False)["input_ids"][:tokens])
        for i in range(count)
    ]
