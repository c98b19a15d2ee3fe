"""Makes text written by a model or an environment safe for terminals and for UTF-8."""

import re
from typing import Any

# C0 and C1 control characters except tab and line feed, and marks that change the direction of text: they can recolor,
# overwrite or retitle a terminal, type into it, or make a line read as another one.
_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")


def escape_control_chars(text: str) -> str:
    """Replace each control character, other than tab and line feed, by its escape sequence."""
    return _CONTROL_CHARS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate by "?", in a text or in all texts of nested lists and dictionaries.

    Python decodes file names and invalid bytes to surrogates, and a model can write one in the JSON of a tool call.
    They cannot be encoded.
    """
    match value:
        case str():
            return value if value.isascii() else value.encode("utf-8", "replace").decode()
        case dict():
            return {replace_surrogates(key): replace_surrogates(inner) for key, inner in value.items()}
        case list() | tuple():
            return [replace_surrogates(inner) for inner in value]
        case _:
            return value
