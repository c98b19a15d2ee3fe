"""The environment: examples from a data set of the Hugging Face hub, or generated words."""

import re
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from reverse_text import scores
from reverse_text.words import make_words

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import SingleTurnEnv

DATASET = "PrimeIntellect/Reverse-Text-RL"
TAG = "reversed_text"
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <{tag}> tags."
EVAL_EXAMPLES = 128


def load_environment(
    dataset: str = DATASET,
    split: str = "train",
    words: int | None = None,
    min_letters: int = 3,
    max_letters: int = 5,
    seed: int = 0,
    eval_examples: int = EVAL_EXAMPLES,
    tag: str | None = None,
    system_prompt: str | None = None,
) -> "SingleTurnEnv":
    """Make the environment: the user's message is a text, the right answer is the text backwards.

    The reward is the longest-common-subsequence ratio; `exact_match`, `letter_overlap` and `length_match` are measured
    with weight 0.

    Args:
        dataset: a data set of the hub with a text column `prompt`.
        split: its split.
        words: generate this many words instead of reading `dataset`; needs no network.
        min_letters: shortest word.
        max_letters: longest word.
        seed: seed of the words.
        eval_examples: number of examples for evaluation: the last ones of the data set, or additional words.
        tag: the answer is between <tag> and </tag>; with "" it is the whole completion. By default
            `reversed_text` for a data set and "" for words.
        system_prompt: the system message; "" for none. By default it asks for the answer in the tag, if there is one.

    Raises:
        ValueError: invalid sizes, or a data set without a column `prompt`.
    """
    import verifiers as vf

    if words is None:
        train, evaluation = _read(dataset, split, eval_examples)
    else:
        train, evaluation = _make(words, eval_examples, min_letters, max_letters, seed)
    if tag is None:
        tag = TAG if words is None else ""
    if system_prompt is None:
        system_prompt = SYSTEM_PROMPT.format(tag=tag) if tag else ""
    parser = vf.Parser(extract_fn=between(tag)) if tag else vf.Parser()
    return vf.SingleTurnEnv(
        dataset=_examples(train, system_prompt),
        eval_dataset=_examples(evaluation, system_prompt) if evaluation else None,
        parser=parser,
        rubric=vf.Rubric(
            funcs=[_reward(score) for score in SCORES],
            weights=[1.0] + [0.0] * (len(SCORES) - 1),
            parser=parser,
        ),
    )


Score = Callable[[str, str], float]

# The first is the reward.
SCORES: tuple[Score, ...] = (scores.lcs_ratio, scores.exact_match, scores.letter_overlap, scores.length_match)


def between(tag: str) -> Callable[[str], str]:
    """Return a function from a text to the stripped text between its first <tag> and </tag>; "" without them."""
    pattern = re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL)

    def extract(text: str) -> str:
        match = pattern.search(text)
        return match.group(1).strip() if match else ""

    return extract


def _reward(score: Score) -> Callable[..., float]:
    def reward(completion: Any, answer: str, parser: Any) -> float:
        return score(answer, parser.parse_answer(completion) or "")

    reward.__name__ = score.__name__  # verifiers names metrics after functions
    return reward


def _read(dataset: str, split: str, eval_examples: int) -> tuple[list[str], list[str]]:
    from datasets import load_dataset

    rows = load_dataset(dataset, split=split)
    if "prompt" not in rows.column_names:
        raise ValueError(f"the data set {dataset} has no column `prompt`, only {', '.join(rows.column_names)}")
    texts = [str(text) for text in rows["prompt"]]
    if not 0 <= eval_examples < len(texts):
        raise ValueError(f"eval_examples = {eval_examples} leaves nothing of the {len(texts)} examples of {dataset}")
    cut = len(texts) - eval_examples
    return texts[:cut], texts[cut:]


def _make(words: int, eval_examples: int, min_letters: int, max_letters: int, seed: int) -> tuple[list[str], list[str]]:
    if words < 1 or eval_examples < 0:
        raise ValueError(f"need words >= 1 and eval_examples >= 0, not {words} and {eval_examples}")
    train = make_words(f"train {seed}", min_letters, max_letters)
    evaluation = make_words(f"eval {seed}", min_letters, max_letters)
    return list(islice(train, words)), list(islice(evaluation, eval_examples))


def _examples(texts: list[str], system_prompt: str) -> "Dataset":
    from datasets import Dataset

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompts = [[*system, {"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, "answer": [text[::-1] for text in texts]})
