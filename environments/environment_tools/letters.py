"""The letter that a reply states as its answer. Pure functions of text."""

import re

from .answers import final_part, last_boxed

LETTERS = "ABCDE"

# Every repetition is bounded: what is searched was written by a model, perhaps to make the search slow.
_STATEMENT = re.compile(
    r"""\b(?:answer|ans|(?:correct|right)[ ](?:option|choice))\b  # "the answer", "ANSWER", "the correct option"
        [ \t*_"'`]{0,4}(?:\bis\b|\bwill[ ]be\b|:|=|-)?[ \t*_"'`:,]{0,4}
        (?:(?:option|choice)\b)?[ \t*_"'`:]{0,4}
        (?:\((?P<wrapped>[A-E])\)|(?P<bare>[A-E]))
        [ \t*_"'`]{0,4}
        (?=$|[\n\r.,;:!)\]])                                     # "A number" continues with a word: an article
      | (?:\((?P<wrapped_first>[A-E])\)|\b(?P<bare_first>[A-E])\b)
        [*_"'`]{0,4}[ ]is[ ]the[ ](?:correct[ ]|right[ ])?(?:answer|option|choice)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_ALONE = re.compile(r"""[ \t*_"'`]*[(\[]?([A-Ea-e])[)\].:]*[ \t*_"'`.]*""")
_BOXED = re.compile(r"\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*\(?([A-Ea-e])\)?\s*\}?\s*")
# A line or a box with a letter alone is not longer.
_SHORT = 40


def stated_letter(text: str) -> str | None:
    r"""Return the letter A to E that a reply states as its final answer, or None if it states none.

    Only the text after the last `</think>` counts. The first of these decides:

    1. The last `\boxed{}`: it must contain only a letter, which may be in parentheses or `\text{}`; otherwise there is
       no answer.
    2. "answer" (or "ans", "correct option", "right choice") and a letter, such as "Answer: C", "the answer is (c)",
       "**Final answer: C**", "Answer: C) 12 km"; or a letter and "is the answer", such as "C is the correct answer". A
       letter without parentheses must be a capital, and only punctuation or the end of the line may follow it: "the
       answer is a number" and "Answer: A number" state nothing. The last statement counts.
    3. The last line, if it is only a letter: "C", "(c)", "**C**", "C."
    """
    text = final_part(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return _only_letter(_BOXED, boxed)
    stated = None
    for match in _STATEMENT.finditer(text):
        wrapped, bare = match["wrapped"] or match["wrapped_first"], match["bare"] or match["bare_first"]
        if wrapped or bare.isupper():
            stated = (wrapped or bare).upper()
    return stated or _only_letter(_ALONE, text.rstrip().rpartition("\n")[2])


def _only_letter(form: re.Pattern[str], text: str) -> str | None:
    match = form.fullmatch(text) if len(text) <= _SHORT else None
    return match.group(1).upper() if match else None
