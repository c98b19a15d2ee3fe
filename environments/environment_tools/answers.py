"""Finds the answer in a reply in one pass, because replies are long, untrusted, and scored on the event loop."""

import re

# A final answer is within this many characters of the end.
TAIL = 20_000

# A longer answer between tags is none.
MAX_ANSWER = 4000

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt)|mbox|boldsymbol|bm|operatorname|boxed|fbox)"
    r"\s*\{([^{}]*)\}"
)
# Commands that do not change what they style.
INVISIBLE = re.compile(
    r"\\(?:text)?color\s*\{\s*[A-Za-z]{1,20}\s*\}|\\underline(?=\s*\{)"
    r"|\\(?:tiny|small|normalsize|[Ll]arge|LARGE|[Hh]uge)(?![A-Za-z])"
)
_LATEX_EXPONENT = re.compile(r"\^\s*\{\s*([-+]?[0-9]{1,3})\s*\}")
_LATEX_DEGREE = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?")
_BOX = re.compile(r"(?<!\\)\\+(?:boxed|fbox)\s*\{")
_BRACES = re.compile(r"\\boxed\s*\{|\\fbox\s*\{|\\.|[{}]", re.DOTALL)


def final_part(text: str) -> str:
    """Return the text of a reply after the last `</think>`, at most `TAIL` characters.

    The result is "" if `<think>` is opened and not closed.
    """
    head, closed, tail = text.rpartition("</think>")
    if not closed and "<think>" in head + tail:
        return ""
    return tail[-TAIL:]


def gold_text(answer: str) -> str:
    r"""Return the right answer of a data set without the reasoning before it and the `\boxed{}` around it.

    Raises:
        ValueError: nothing is left, so no reply could be right.
    """
    text = final_part(answer).strip()
    boxed = last_boxed(text)
    if not (text := text if boxed is None else boxed):
        raise ValueError(f"the answer is only reasoning or an empty box: {answer[-60:]!r}")
    return text


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Return the content of the last <tag>...</tag>, stripped; None if there is none or it is too long."""
    head, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, content = head.rpartition(f"<{tag}>")
    return content.strip() if closed and opened and len(content) <= MAX_ANSWER else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\fbox`) whose braces close; None if there is none.

    The last is the one that begins last, so of nested boxes the inner one. Escaped braces (`\{`) do not count.
    """
    if (first := _BOX.search(text)) is None:
        return None
    open_boxes: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    for token in _BRACES.finditer(text, first.start()):
        brace = token.group()
        if brace == "}":
            if not open_boxes:
                continue
            is_box, start = open_boxes.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, token.start())
        elif brace == "{" or brace.startswith(("\\boxed", "\\fbox")):
            open_boxes.append((len(brace) > 1, token.end()))
    return text[best[0] : best[1]].strip() if best else None


def unwrap(text: str) -> str:
    r"""Return LaTeX with the contents of `\text{}`, `\mathbf{}` and the like instead of the commands.

    Degrees and exponents in braces become `°` and `^2`, so that no braces are left in the contents.
    """
    if "\\" in text:
        text = _LATEX_DEGREE.sub("°", _LATEX_EXPONENT.sub(r"^\1 ", INVISIBLE.sub("", text)))
        for _ in range(3):  # nested
            text = _WRAPPER.sub(r" \1 ", text)
    return text
