"""Your reward, which NAME.toml adds to that of the environment. Change it; `weight` in NAME.toml is its share.

With weight 1, a small random model on a CPU learns something within minutes: the length, the kinds of characters and
the usual characters of your answers. It does not learn to answer your questions; the metric WHOLE counts right replies.
A model that can answer needs no partial credit: with weight 0 this is only a metric.

The parameters may also be `prompt`, `completion`, `info` and others (docs/environments.md, "Add rewards").
"""

import re
from difflib import SequenceMatcher


def my_reward(text: str, answer: str) -> float:
    """Return how similar reply and answer are, from 0 to 1: half for the characters, half for their kinds."""
    reply, right = text.strip()[:500], answer.strip()[:500]
    return (_similarity(reply, right) + _similarity(_kinds(reply), _kinds(right))) / 2


def _similarity(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


def _kinds(text: str) -> str:
    """Replace each letter by `a` and each digit by `0`."""
    return re.sub(r"\d", "0", re.sub(r"[^\W\d_]", "a", text))
