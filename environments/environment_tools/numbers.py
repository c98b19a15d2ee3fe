"""The number that a text states, read the same way by all environments. Pure functions of untrusted text.

A text that could mean something else than one number has none: a right answer in a strange form scores 0, which is
better than a wrong answer that scores 1.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from .answers import final_part, last_boxed, unwrap

# More characters than any answer has, and limits of powers: computing with a million digits would take too long.
MAX_CHARS = 400
MAX_EXPONENT = 400
MAX_BITS = 4096

_THIN = "\x1f"
"""A thin space between digits: unlike a space, it can only group thousands."""
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺"
_CHARACTERS = str.maketrans(
    {
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013", "-"),
        **dict.fromkeys("\u00d7⋅·∙", "*"),
        **dict.fromkeys("\u2044\u2215÷", "/"),
        **dict.fromkeys("\u00a0\u2002\u2003\u3000", " "),
        **dict.fromkeys("\u2006\u2007\u2008\u2009\u200a\u202f", _THIN),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **{half[0]: rf"\frac{{{half[1]}}}{{{half[2]}}}" for half in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅛18")},
        "≈": "=",
        "º": "°",
        "℃": "°C",
        "℉": "°F",
        "\u2126": "Ω",
        "\u212b": "Å",
        "\u03bc": "µ",
    }
)
# (what a text must contain, pattern, replacement), applied in this order. A command that is not here leaves a
# backslash, and so no number.
_LATEX = (
    ("left", r"\\left(?![A-Za-z])", ""),
    ("right", r"\\right(?![A-Za-z])", ""),
    ("style", r"\\(?:display|text)style(?![A-Za-z])", ""),
    ("bf", r"\\bf(?:series)?(?![A-Za-z])", ""),
    ("frac", r"(?<=[0-9])\s*(?=\\[dtc]?frac)", " "),  # 1\frac{1}{2}
    ("frac", r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2) "),
    ("frac", r"\\[dtc]?frac\s*([0-9])\s*([0-9])(?![0-9])", r"(\1)/(\2) "),
    ("times", r"\\times(?![A-Za-z])", "*"),
    ("cdot", r"\\cdot(?![A-Za-z])", "*"),
    ("div", r"\\div(?![A-Za-z])", "/"),
    ("approx", r"\\approx(?![A-Za-z])", "="),
    ("mu", r"\\mu(?![A-Za-z])\s*", "µ"),
    ("Omega", r"\\Omega(?![A-Za-z])", "Ω"),
    ("pounds", r"\\pounds(?![A-Za-z])\s*", "£"),
    ("AA", r"\\AA(?![A-Za-z])", "Å"),
    ("\\", r"(?<=[0-9])\\[,!;:](?=[0-9]{3}(?![0-9]))", _THIN),
    ("\\", r"\\(?:[,;:! ()\[\]\n]|q?quad(?![A-Za-z]))", " "),
    ("\\", r"\\([$%#&_€£])", r"\1"),
)
# Before the others, which make `*` of a multiplication sign.
_MARKDOWN = (
    ("~~", r"~~[^~]*~~", " "),
    ("**", r"(?<![\w)*])(\*{2,3})(?=[^\s*])((?:[^*]|\*(?!\*))*)(?<=[^\s*])\1(?![\w*])", r"\2"),
    ("*", r"(?<![\w)*])\*(?=[^\s*])([^*]*)(?<=\S)\*(?![\w*])", r"\1"),
)
_PLAIN = (
    ("{,}", r"\{,\}", ","),
    ("~", r"~", " "),
    ("**", r"(?<=[A-Za-z0-9)}])(\s?)\*\*\1(?=[-+({A-Za-z0-9])", "^"),
    ("_", r"(?<![A-Za-z0-9_])_{1,3}(?=[-+$.0-9])|(?<=[0-9%.])_{1,3}(?![A-Za-z0-9_{])", ""),
    ("_", r"(?<=[A-Za-z])_(?:\{\s*\w{1,9}\s*\}|[A-Za-z0-9](?![A-Za-z0-9]))", ""),  # x_1
    ("`", r"`", ""),
    ("x", r"(?<=[0-9])\s*x\s*(?=[0-9])", "*"),  # 1.5 x 10^3
    ("$", r"(?<=[-+])\$(?=\()", ""),  # -$\frac{1}{2}$
    ("$", r"\$(?!\s?[-+]?\.?[0-9])", " "),  # the ends of $18$ and $x = 18$
    ("(", r"(?<![\w).])\(\s*((?:[-+](?![^()]*\)\s*\^))?[$€£]?[0-9.,]+)\s*\)", r"\1"),  # not (-2)^2
    ("{", r"(?<![A-Za-z0-9}])\{\s*((?:[-+](?![^{}]*\}\s*\^))?[$€£]?[0-9.,]+)\s*\}", r"\1"),
)
_MARKDOWN_RULES, _LATEX_RULES, _PLAIN_RULES = (
    tuple((part, re.compile(pattern), plain) for part, pattern, plain in rules) for rules in (_MARKDOWN, _LATEX, _PLAIN)
)
_POWER = re.compile(rf"([{_SUPERSCRIPTS}]+)")
_DIGITS = str.maketrans(_SUPERSCRIPTS, "0123456789-+")

_CURRENCY = r"(?:(?:(?:US|AU|CA)?[$€£¥₹]|USD|EUR|GBP|INR|Rs\.?)\s?)"
_UNSIGNED = (
    rf"(?:(?:[1-9][0-9]{{0,2}}(?:[,{_THIN} ][0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
)
_VALUE = re.compile(
    rf"""(?P<sign>[-+]?)\s?{_CURRENCY}?(?P<sign_behind>[-+]?)
    (?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s?/))?                                      # 1 1/2
    (?P<number>{_UNSIGNED})
    (?:\s?/\s?(?P<divisor>{_UNSIGNED})
      |\s?\^\s?[{{(]?\s?(?P<power>[-+]?[0-9]{{1,3}})\s?[}})]?
      |\s?\*\s?10(?:\s?\^\s?[{{(]?\s?(?P<exponent>[-+]?[0-9]{{1,3}})\s?[}})]?)(?![0-9])
    )?(?![.,]?[0-9]|\s?[/^*+:=-]\s?[({{]?[-+]?[0-9])""",
    re.VERBOSE,
)
# In running text: all that could belong to one number or calculation, which `_VALUE` then accepts or not.
_ATOM = (
    rf"(?:[1-9][0-9]{{0,2}}(?: [0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?|\.?[0-9](?:[0-9.,{_THIN}]*[0-9])?)"
    r"(?:[eE][-+]?[0-9]+(?!\w))?%?"
)
_IN_TEXT = re.compile(
    rf"(?:(?<![\w)\]}}%.])[-+]{_CURRENCY}?)?(?:(?<![\w.,])|(?<=案是)|(?<=[为约])(?<!不为))(?:{_CURRENCY}[-+]?)?"
    r"(?:[0-9]+[ ]+(?=[0-9]+/[0-9]))?"
    rf"{_ATOM}(?:\s?[*/^:+-]\s?[({{]?[-+]?{_CURRENCY}?{_ATOM}[)}}]?)*"
)
_UNIT_EXPONENT = re.compile(
    r"(?<=[A-Za-z])(?<!\b[xyz])\s?\^\s?\{?\s?[-+]?[0-9]{1,2}\s?\}?|(?<=[A-Za-z])(?<![0-9.][eE])[-+]?[0-9](?![0-9])"
)
_LETTERS = "A-Za-zÀ-ÖØ-öø-ÿ"
_UNIT = re.compile(
    rf"[{_LETTERS}%°µΩ€£¥₹¢/](?:[{_LETTERS}%°µΩ'\u2019./*()\s-]*[{_LETTERS}%°µΩ.)])?"
    r"|[美元円块个個只人次天小时分钟岁米厘公里斤克本원개명]+"
)
_TAG = re.compile(r"</?[a-z]{1,20}>")
_WORD = re.compile(rf"[{_LETTERS}]+")
_MULTIPLE = re.compile(r"\s+([A-Za-z]+)")
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MULTIPLES |= {"dozens": 12, "lakh": 10**5, "crore": 10**7}
# Words behind a number that change it or make it a part of something else.
_NO_UNITS = """
or and to plus minus times less more than not no but over by divided multiplied half third fifth eighth quarter tenth
hundredth thousandth one two three four five six seven eight nine ten eleven twelve thirteen twenty thirty forty fifty
hundred thousand million billion trillion dozen dozens lakh crore bn mn mil mio point zero negative below under above
doubled tripled halved raised pi sqrt ln log sin cos tan exp mod factorial infinity nan theta alpha beta lambda bc bce
if unless except without between wrong incorrect impossible false is are was should would least most
tens hundreds thousands millions billions trillions
score gross mil millones millionen milliarden milliard milliards mrd tausend mille cientos douzaines
más mas più mehr moins menos über unter négatif negativ moitié demi einhalb doppelt
"""
_PARTS = (
    "halves thirds fourths fifths sixths sevenths eighths ninths tenths twelfths sixteenths hundredths thousandths "
    "millionths billionths"
)
_NEGATIONS = "not no never neither nor wrong incorrect false except if unless"
_NOT_UNITS, _DENIALS = frozenset(f"{_NO_UNITS} {_PARTS}".split()), frozenset(_NEGATIONS.split())
_UNIT_LETTERS = frozenset("msghlLNJWVACFdTK")
_MAGNITUDES = frozenset("kKMB")  # 18K may be a temperature or money
_PREFIX = re.compile(
    r"(?:about|approximately|around|approx\.?|roughly|exactly)\s+"
    r"|(?P<words>[A-Za-z][A-Za-z' ]{0,40}?)(?::|\s(?:is|are|equals|was)\b:?)\s*",
    re.IGNORECASE,
)
_NAME = re.compile(r"(?P<words>[A-Za-z][A-Za-z ]{0,40}?)\s?(?:\([\w, ]{1,10}\))?:?")
# Around a number in running text, these make another number or none of it: x/18, minus 18, 17 or 18, not 18, x > 18,
# half of 18, 0.(3).
_CHANGED_BEFORE = re.compile(
    r"(?:[/^±≠≤≥⩽⩾≦≧≪≫√∛]|[!<>]=|(?<![=>-])>|(?<!<)<|\\(?:[gl]eq{0,2}(?:slant)?|n(?:ot\s?=|[gl]?eq?)|lesssim|gtrsim|ll|gg|pm|mp"
    r"|lt|gt|[bp]mod\{?|sqrt(?:\[[^]]{0,9}\])?\{?|(?:overline|bar|dot|[bx]?cancel|sout|[hv]?phantom)\{?)|\}\s?\{"
    r"|\b(?:sqrt|log|ln|exp|f|base|(?:arc)?(?:sin|cos|tan)h?)\s?\(?|[0-9](?:['\u2019~…{]|\.\.|\s?[—;•\u2217⋆\u2236\uff5e⊕∈\u222a∧%!])"
    r"|\b(?:minus|negative|plus|times|than|(?:not|cannot|never)(?: be)?|over|under|above|below|twice|double|triple|mod"
    r"|divided by)|(?:\b(?:half|third|quarter|root|square|cube|power|percent)|%) of|\bbetween [0-9]\S* and|[0-9] choose"
    r"|[0-9]%?\s(?:to(?: the)?|by|vs\.?|versus|through|remainder|R|out of|of|in|per|less|multiplied by)"
    r"|n['\u2019]t(?: be)?|(?<![A-Za-z'])(?-i:[a-z])\s?[+*-]|[0-9]\s?(?-i:[abefijknopqruvwxyz])\s?="
    r"|(?<![\w)])-(?-i:[a-z])\s?=|(?<![A-Za-z])(?-i:(?<![0-9])[a-z]|[xyzn])\s?[-+*/^]\s?[0-9]{1,9}\s?="
    r"|(?:[:=(\[{]|\b(?:is|are))\s?[-+$]?[0-9][0-9.]{0,20}[,;]"
    r"|[0-9]\S*\s+\(?(?:or|ou|oder|или)(?:\s+(?:about|around|\w{1,9}\s*=))?|(?<=[0-9][eE])[-+]|[0-9]\.?\("
    r"|[0-9]\S*\s+\(?(?:(?:but|or)\s+)?(?:maybe|perhaps|possibly|alternatively),?)\s*$",
    re.IGNORECASE,
)
_CHANGED_BEHIND = re.compile(
    r"\s?(?:\\(?!\\|end\b)|\*?\s?(?:[π√]|(?:pi|sqrt)\b))|(?:[abijeknpqruvwxyzkKMBR]|bn|mn|[₀-₉])(?![A-Za-z])|[eE][-+]?[0-9]"
    r"|[(_]\{?[0-9]|_\{?[A-Za-z\\]|[\u0304\u0305\u0307]|\+|\s?[<>≤≥≠](?![/|])|\sor\s(?:more|fewer|less)\b"
    rf"|[\s-](?:squared|cubed)\b|\s(?:[kKMBxyzn]|bn|mn|factorial|point\s[a-z]+|{_PARTS.replace(' ', '|')})(?![A-Za-z])"
    r"|\s(?:mil|mille|millions|millionen|millones|tausend|Mio|Mrd|тыс|млн)\b|\s?[百千万億亿萬만천억]"
    r"|\s(?:degrees\s)?below\szero|[ -]and[ -](?:an?|one|two|three)[\s-](?:hal[fv]|third|quarter|fourth|fifth|eighth)"
    r"|\s?[+*/-]\s?\(?[xyzn](?![A-Za-z])|\s?!\s?[+*/=-]|\W{1,9}(?:(?:is|are|was)\s)?(?:wrong|incorrect|false)\b"
)
# 2 hours and 10 minutes: parts of one quantity.
_PART_BEFORE = re.compile(
    r"(?:[$€£]\s?[0-9]+|[0-9]\s?(?:hours?|hrs?|h|minutes?|mins?|days?|weeks?|years?|feet|foot|ft|pounds?|lbs?|dollars?|euros?)),?"
    r"(?:\sand)?\s$"
)
_PART_BEHIND = re.compile(
    r"\s?(?:h(?:ou)?rs?|m|min(?:ute)?s?|s|sec(?:ond)?s?|inch(?:es)?|oz|ounces?|cents|days|months)\b"
)
_MIXED_BEFORE = re.compile(r"[0-9]\s+and\s*$")
_SPACED_SIGN = re.compile(r"([=:]|####|\b(?:is|are|was|equals)\b)(\s*[-+])\s+(?=[$€£]?\s?\.?[0-9])")


def plain_text(text: str) -> str:
    r"""Return the text with ASCII characters instead of Markdown, LaTeX and others, where these mean the same.

    Such as `*` for `×` and `\times`, `(1)/(2)` for `\frac{1}{2}`, `^2` for `²`.
    """
    text = _replace(text, _MARKDOWN_RULES)
    if not text.isascii():
        text = _POWER.sub(r"^\1", text.translate(_CHARACTERS)).translate(_DIGITS)
    if "\\" in text:
        text = unwrap(_replace(unwrap(text), _LATEX_RULES))  # again, for the box around a fraction
    return _replace(text, _PLAIN_RULES)


def number_of(text: str, *, evaluate: bool = True) -> Fraction | None:
    r"""Return the number that a short text consists of, or None.

    These belong to the number: thousands separators, currency and percent signs (which do not change it), a unit or
    words behind it, `x =` or `the answer is` before it, `$...$`, `\text{}`, `\boxed{}` and `**` around it, and
    `1e3`, `1.5 \times 10^3`, `10^3`, `36/2`, `\frac{36}{2}`, `1 1/2` and `18 million`. Other calculations, lists,
    ranges, inequalities and equations between different numbers are no number.

    Args:
        text: text of at most `MAX_CHARS` characters; a longer one is no number.
        evaluate: accept powers, fractions and multiples. Without, only digits with an optional exponent `e3`.
    """
    if text.isdecimal() and text.isascii() and len(text) <= MAX_CHARS:
        return Fraction(int(text))
    values = set()
    for value, unit in split_numbers(text, evaluate=evaluate):
        if not is_unit(unit):
            return None
        values.add(value)
    return values.pop() if len(values) == 1 else None


def split_numbers(text: str, *, evaluate: bool = True) -> list[tuple[Fraction, str]]:
    """Return the number of a short text and what stands behind it; several if the text is an equation of numbers.

    The list is empty if there is anything else. `number_of` describes what belongs to a number.
    """
    if len(text) > MAX_CHARS:
        return []
    numbers = []
    parts = plain_text(text).strip(" \t\n\r*\"'“”" + _THIN).removeprefix("=").split("=")
    for part in map(str.strip, parts):
        if number := _split_number(part, evaluate):
            numbers.append(number)
        elif len(parts) == 1 or not ((name := _NAME.fullmatch(part)) and _is_harmless(name["words"])):
            return []
    return numbers


def final_number(text: str) -> Fraction | None:
    r"""Return the number that a reply gives as its answer, or None.

    Only the text after the last `</think>` counts. If it contains a `\boxed{}`, the last box must be a number (see
    `number_of`). Otherwise the last number of the text is the answer; none, if it belongs to a calculation without a
    result, such as `10 - 3`.
    """
    text = final_part(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return number_of(boxed)
    for line in reversed(text.split("\n")):
        line = _SPACED_SIGN.sub(r"\1\2", _UNIT_EXPONENT.sub("", plain_text(_TAG.sub(" ", line))))
        if found := list(_IN_TEXT.finditer(line)):
            return _number_in_line(line, found[-1])
    return None


def show_number(value: Fraction) -> str:
    """Return the number as text: with decimals if that is exact, else as a fraction."""
    decimal = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{decimal:f}" if Fraction(decimal) == value else str(value)


def _replace(text: str, rules: Sequence[tuple[str, re.Pattern[str], str]]) -> str:
    for part, pattern, plain in rules:
        if part in text:
            text = pattern.sub(plain, text)
    return text


def _split_number(text: str, evaluate: bool) -> tuple[Fraction, str] | None:
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(" *")
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1].strip()
    prefix = _PREFIX.match(text)
    if prefix and _is_harmless(prefix["words"] or ""):
        text = text[prefix.end() :]
    match = _VALUE.match(text)
    value = None if match is None else _evaluate(match, evaluate)
    if match is None or value is None:
        return None
    rest = text[match.end() :]
    multiple, factor = _multiple(rest) if evaluate else (0, 1)
    return value * factor, rest[multiple:]


def _number_in_line(line: str, match: re.Match[str]) -> Fraction | None:
    behind, text = line[match.end() :], match.group()
    before = line[max(match.start() - 40, 0) : match.start()]
    if len(text) > MAX_CHARS or _CHANGED_BEFORE.search(before) or _CHANGED_BEHIND.match(behind):
        return None
    if _PART_BEHIND.match(behind) and _PART_BEFORE.search(before):
        return None
    if (text[0] in "+-" and before.rstrip().endswith(("+", "-"))) or ("/" in text and _MIXED_BEFORE.search(before)):
        return None
    value = _VALUE.fullmatch(text.removesuffix("%"))
    number = None if value is None else _evaluate(value, evaluate=True)
    multiple, factor = _multiple(behind)
    behind = behind[multiple:]
    if number is None or (multiple and (_multiple(behind)[0] or _CHANGED_BEHIND.match(behind))):
        return None
    return number * factor


def _multiple(behind: str) -> tuple[int, int]:
    """Return the length of a word such as `million` behind a number, and its value; 0 and 1 if there is none."""
    word = _MULTIPLE.match(behind)
    factor = _MULTIPLES.get(word[1].lower()) if word else None
    return (0, 1) if word is None or factor is None else (word.end(), factor)


def _is_harmless(words: str) -> bool:
    return "n't" not in words and _DENIALS.isdisjoint(word.lower() for word in _WORD.findall(words))


def is_unit(text: str) -> bool:
    """Whether the text behind a number leaves the number as it is."""
    text = text.strip(" ()\t\n,.!*" + _THIN) if text.strip() not in ("!", "!!") else text
    if not text:
        return True
    text = _UNIT_EXPONENT.sub("", text)
    if len(text) > 60 or not _UNIT.fullmatch(text):
        return False
    words = _WORD.findall(text)
    if words and (words[0] in _MAGNITUDES or words[0] in ("squared", "cubed")):
        return False
    if "a" in words[1:-1]:  # an article
        words.remove("a")
    return all(word in _UNIT_LETTERS if len(word) == 1 else word.lower() not in _NOT_UNITS for word in words)


def _evaluate(match: re.Match[str], evaluate: bool) -> Fraction | None:
    whole, divisor, power, exponent = match["whole"], match["divisor"], match["power"], match["exponent"]
    if not evaluate and (whole or divisor or power or exponent):
        return None
    value = _fraction(match["number"])
    if value is None:
        return None
    if divisor:
        by = _fraction(divisor)
        if not by:
            return None
        value /= by
        if whole:
            if not 0 < value < 1:
                return None
            value += int(whole)
    elif power or exponent:
        base = value if power else Fraction(10)
        raised = _power(base, int(power or exponent))
        if raised is None:
            return None
        value = raised if power else value * raised
    signs = match["sign"] + match["sign_behind"]
    return -value if signs == "-" else None if len(signs) > 1 else value


def _fraction(text: str) -> Fraction | None:
    text = text.replace(",", "").replace(_THIN, "").replace(" ", "")
    if text.isdecimal():
        return Fraction(int(text))
    mantissa, _, exponent = text.lower().partition("e")
    value = Fraction(mantissa.rstrip("."))
    if not exponent:
        return value
    return value * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MAX_EXPONENT else None


def _power(base: Fraction, exponent: int) -> Fraction | None:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > MAX_EXPONENT or bits * abs(exponent) > MAX_BITS or (base == 0 and exponent <= 0):
        return None
    return base**exponent
