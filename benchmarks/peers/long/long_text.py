"""The environment of the longer recipe: completions of 64 to 256 letters, rewarded by their share of vowels.

The reward needs no knowledge and can be raised from any policy, so that only the length of the completions differs from
the recipe of words. prime-rl loads `load_environment`; the peer takes `PROMPTS` and `vowel_share`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers import SingleTurnEnv

PROMPTS = 20_000


def vowel_share(completion: str) -> float:
    """Return the share of vowels among the characters of a completion, 0 for an empty one."""
    return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)


def make_prompts(count: int = PROMPTS) -> list[str]:
    """Return the words that the completions start from."""
    from itertools import islice

    from reverse_text.words import make_words

    return list(islice(make_words("long text", 3, 4), count))


def load_environment(count: int = PROMPTS) -> "SingleTurnEnv":
    """Make the environment: one user message, one long reply."""
    import verifiers as vf
    from datasets import Dataset

    def reward(completion: list[dict[str, str]]) -> float:
        return vowel_share(completion[-1]["content"])

    rows = [{"prompt": [{"role": "user", "content": word}]} for word in make_prompts(count)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]))
