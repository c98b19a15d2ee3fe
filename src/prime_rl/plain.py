"""Text of others on a terminal: what a model or an environment wrote is shown, never obeyed.

A completion may hold escape sequences, which would recolour, overwrite or retitle a terminal or even type into it, and
marks that turn the direction of writing, which make a line read as another. Both are spelled out instead.
"""

import re

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")


def visible(text: str) -> str:
    """Return `text` with every character that a terminal obeys, other than tab and line feed, as its escape."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
