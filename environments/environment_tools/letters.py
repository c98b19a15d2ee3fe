"""The letter that a reply states as its answer. Pure functions of text."""

import re

from .answers import final_part, last_boxed, unwrap

LETTERS = "ABCDE"

_BRACKETS = str.maketrans("\uff08\uff09\uff1a", "():")
# Every repetition is bounded: what is searched was written by a model, perhaps to make the search slow.
_DECORATION = re.compile(
    r"[*_`\"“”«»$#✅✔✓👉。]|</?answer>|</s>|<\|[a-z_]{1,20}\|>|\\[()\[\],;:!]|\\(?:left|right)(?![A-Za-z])"
)
_WRAPPED, _BARE = r"[(\[] ?(?P<wrapped>[A-Ea-e]) ?[)\]]", r"(?P<bare>[A-E])(?![\w'\u2019])"
_LETTER = rf"(?:{_WRAPPED}|{_BARE})"
# Behind a bare letter; before a word it would be an article, as in "A number".
_END = r" ?(?:$|[\n.,;:!)\]}]|\\?[0-9])| [-\u2013\u2014→(|]| (?:because|since|as|for|which|with|due|where|given)\b"
_STATED = rf"(?:{_WRAPPED}|{_BARE}(?={_END}))"
_NAME = r"(?:(?:the )?(?:option|choice|letter|answer)\b ?:? ?)?"
_STATEMENTS = tuple(
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        # "Answer: C", "the answer is (c)", "the correct option would be C", "La respuesta es C", "答案是C"
        r"\b(?:answer|ans|solution|(?:correct|right|best|final) (?:option|choice|letter))\b(?: choice| option)?"
        r"(?: to (?:the|this) (?:question|problem))?(?: (?:is|will be|would be|should be|must be))?"
        rf"(?: therefore| thus)?(?: ?[:=.>→\u2013\u2014-]){{0,2}}\s{{0,3}}(?:\((?=option|choice))?{_NAME}{_STATED}",
        r"(?:\b(?:respuesta|réponse|resposta|risposta|antwort|ответ)\b|答案|정답)(?: correct[ae])?"
        rf"(?: ?(?:es|est|é|è|ist|是|为)(?!\w\w))? ?:?\s{{0,3}}{_STATED}",
        r"\b(?:(?:it|this|that)(?: is|['\u2019]s| must be| should be)|therefore,?|thus,?|hence,?|so,?) "
        rf"{_NAME}{_LETTER}(?= ?(?:[.!)\n]|$))",  # "So it is C."
        rf"\b(?:choose|select|pick|choosing|go with) {_NAME}{_STATED}",
        # "C is the answer", "option C is correct", "C) 12 km is right"
        rf"(?<![\w'\u2019(\[])(?<!\b[A-E], )(?:option |choice )?{_LETTER}"
        r"(?:[.):] (?:(?!\. |\b(?-i:[A-E])\b)[^\n]){0,40}?)? is "
        r"(?:(?:the )?(?:correct|right)\b|(?:the|my)(?: final)? (?:answer|option|choice|solution)\b)",
    )
)
# Before a statement: it is denied, only supposed, or about something else with a letter.
_NOT_STATED = re.compile(
    r"(?:\b(?:if|suppose|assume|assuming|assumed|whether|unless|why|not|never|wrong|incorrect|neither|nor|cannot)\b|n['\u2019]t\b)"
    r"[^.,;\n]{0,20}$|\b(?:mistake (?:is|would be) to|doubt|false|might (?:think|say|believe)|"
    r"(?:many|some|others|most)(?: students| people)?(?: would| might| may)?(?: think| say| believe)?)"
    r"(?: that)?(?: the)? $"
    r"|\b(?:each|every|and|or|than|statement|train|point|pipe|car|person|set|team|city|town|station|"
    r"grade|class|type|plan|method|column|row|machine|box|group|vitamin) $",
    re.IGNORECASE,
)
# Behind it: another letter, or that it is wrong.
_ANOTHER = re.compile(
    r"[ ,(\u2013\u2014-]{1,3}(?:which )?(?:is )?(?:wrong|incorrect|false|not (?:correct|right|possible))\b"
    r"|[ ,(\u2013\u2014-]{1,3}but (?:it )?(?:could|might|may) (?:also )?be (?:option )?[(\[]?[A-E](?![\w'\u2019])"
    r"| ?[)\]]?[.:]? ?(?:[,;/&+]|[(\[\u2013\u2014-](?= ?(?:or|maybe|perhaps)\b)|\.\.|\bor\b|\band\b|\bas well as\b) ?"
    r"(?:or |and )?(?:maybe |perhaps |possibly |alternatively,? )?(?:option |choice )?[(\[]?[A-E](?![\w'\u2019])"
    r"(?! (?:is|are|was|were|does|has|gives|can|would)\b)"
    r"|(?:(?!\bnot\b)[^\n]){0,40}?\bor (?:option )?[(\[]?[A-E](?:[)\]]| ?\()"
)
_ALONE = re.compile(r"(?:(?:option|choice|letter) ?:? ?)?[(\[]? ?([A-E]) ?[)\].:]{0,3}", re.IGNORECASE)
_BEFORE_BOXED = re.compile(r"^(?:the )?(?:final |correct )?answer(?: is)? ?:? ?", re.IGNORECASE)
_LABELLED = re.compile(r"(?:[(\[]([A-Ea-e])[)\]]|([A-E])(?:\)|[.:](?= ))) ?(\S.{0,200})")
_LABEL = re.compile(r"(?<![\w'\u2019])[(\[]?[A-E][).:\]](?: |$)")
# A line or a box with a letter alone is not longer.
_SHORT = 40


def stated_letter(text: str) -> str | None:
    r"""Return the letter A to E that a reply states as its final answer, or None if it states none.

    Only the text after the last `</think>` counts; Markdown and LaTeX do not. The first of these decides:

    1. The last `\boxed{}`: it must be a letter, as in `C`, `(c)`, `\text{C}`, `C) 12`; otherwise there is no answer.
    2. The last line, if it is a letter alone: "C", "(c)", "**C**", "Option C."
    3. The last statement such as "Answer: C", "the answer is (c)", "Answer: (C) 12 km", "C is correct", "so it is C.",
       "I choose C". A letter without parentheses must be a capital, and no other word may follow it: "the answer is a
       number" and "Answer: A number" state nothing. Neither does a statement of two letters, nor one that is denied.
    4. The last line, if it is an option with its text ("C) 12 km") and does not end a list of options.
    """
    text = final_part(text)
    boxed = last_boxed(text)
    if boxed is not None:
        boxed = _BEFORE_BOXED.sub("", _without_decoration(boxed).strip())
        return _only_letter(boxed) or _label(boxed)
    text = _without_decoration(text)
    *before, last = [line.strip() for line in text.rstrip().rsplit("\n", 10) if line.strip()] or [""]
    in_list = (_label(before[-1]) or _only_letter(before[-1])) if before else None
    if letter := _only_letter(last):
        return None if _follows(letter, in_list) else letter
    stated = [statement for pattern in _STATEMENTS for statement in _find(pattern, text)]
    if stated:
        return max(stated)[1] or None
    letter = _label(last)
    return None if letter is None or _follows(letter, in_list) else letter


def _follows(letter: str, other: str | None) -> bool:
    """Whether the letter continues a list, which states nothing."""
    return other is not None and ord(letter) == ord(other) + 1


def _without_decoration(text: str) -> str:
    return re.sub(r"[ \t]{1,100}", " ", _DECORATION.sub("", unwrap(text).translate(_BRACKETS)))


def _find(pattern: re.Pattern[str], text: str) -> list[tuple[int, str]]:
    """Return where letters are stated, and the letters; "" for a statement of several."""
    found = []
    for match in pattern.finditer(text):
        wrapped, bare = match["wrapped"], match["bare"]
        if not (wrapped or bare.isupper()) or _NOT_STATED.search(text, max(match.start() - 40, 0), match.start()):
            continue
        end = match.end("wrapped" if wrapped else "bare")
        found.append((end, "" if _ANOTHER.match(text, end) else (wrapped or bare).upper()))
    return found


def _only_letter(text: str) -> str | None:
    match = _ALONE.fullmatch(text) if len(text) <= _SHORT else None
    return match[1].upper() if match else None


def _label(text: str) -> str | None:
    match = _LABELLED.fullmatch(text)
    if match is None or _LABEL.search(match[3]) or _ANOTHER.match(text, match.end(1) if match[1] else match.end(2)):
        return None
    return (match[1] or match[2]).upper()
