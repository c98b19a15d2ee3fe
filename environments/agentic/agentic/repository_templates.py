"""Correct repositories, and edits that break them: `defects` are (file, right text, wrong text)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Template:
    """A repository, what a user complains about, edits that break it, and tests of the correct code."""

    complaint: str
    files: Mapping[str, str]
    defects: Sequence[tuple[str, str, str]]
    tests: Sequence[tuple[str, str, Sequence[Any], Any]]


_INTERVALS = Template(
    "Calendars show wrong free time and wrong overlaps.",
    {
        "README.md": "# intervals\n\nHalf-open intervals [start, end) as lists of two integers.\n",
        "intervals.py": '''"""Half-open intervals [start, end)."""


def overlaps(a, b):
    """Whether two intervals have a common point."""
    return a[0] < b[1] and b[0] < a[1]


def merge(intervals):
    """Return the union as sorted, disjoint intervals; those that touch become one."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
''',
        "calendar_tools.py": '''from intervals import merge


def free_time(busy, day):
    """Return the parts of the interval `day` that no interval of `busy` covers."""
    free, start = [], day[0]
    for begin, end in merge(busy):
        if begin > start:
            free.append([start, min(begin, day[1])])
        start = max(start, end)
    if start < day[1]:
        free.append([start, day[1]])
    return free
''',
        "test_intervals.py": """import unittest
from calendar_tools import free_time
from intervals import merge, overlaps


class Intervals(unittest.TestCase):
    def test_merge(self):
        self.assertEqual(merge([[1, 3], [2, 4]]), [[1, 4]])

    def test_overlaps(self):
        self.assertTrue(overlaps([1, 3], [2, 4]))

    def test_free_time(self):
        self.assertEqual(free_time([[2, 3]], [0, 5]), [[0, 2], [3, 5]])
""",
    },
    (
        ("intervals.py", "a[0] < b[1]", "a[0] <= b[1]"),
        ("intervals.py", "max(merged[-1][1], end)", "end"),
        ("calendar_tools.py", "start = max(start, end)", "start = end"),
        ("calendar_tools.py", "start < day[1]", "start > day[1]"),
    ),
    (
        ("intervals", "overlaps", [[3, 5], [1, 3]], False),
        ("intervals", "overlaps", [[1, 3], [3, 5]], False),
        ("intervals", "overlaps", [[1, 9], [2, 3]], True),
        ("intervals", "merge", [[[1, 9], [2, 3], [4, 5]]], [[1, 9]]),
        ("intervals", "merge", [[[5, 6], [1, 2], [2, 4]]], [[1, 4], [5, 6]]),
        ("calendar_tools", "free_time", [[[2, 3]], [0, 5]], [[0, 2], [3, 5]]),
        ("calendar_tools", "free_time", [[[-9, -5]], [0, 5]], [[0, 5]]),
        ("calendar_tools", "free_time", [[], [0, 5]], [[0, 5]]),
    ),
)

_SHOP = Template(
    "Totals on the invoices are wrong for some orders.",
    {
        "README.md": "# shop\n\nPrices are in cents. Orders of 10 or more of one article get a rebate of 5 %.\n",
        "prices.py": '''REBATE_FROM = 10
REBATE_PERCENT = 5


def line_total(price, count):
    """Return the cents of `count` articles, rounded down after the rebate."""
    total = price * count
    if count >= REBATE_FROM:
        total = total * (100 - REBATE_PERCENT) // 100
    return total
''',
        "invoice.py": '''from prices import line_total

FREE_SHIPPING_FROM = 5000
SHIPPING = 490


def invoice_total(lines):
    """Return the cents of an order: lines of [price, count], and shipping below FREE_SHIPPING_FROM."""
    total = sum(line_total(price, count) for price, count in lines)
    if 0 < total < FREE_SHIPPING_FROM:
        total += SHIPPING
    return total


def format_cents(cents):
    """Return 1234 as "12.34"."""
    return f"{cents // 100}.{cents % 100:02d}"
''',
        "test_invoice.py": """import unittest
from invoice import format_cents, invoice_total


class Invoice(unittest.TestCase):
    def test_rebate(self):
        self.assertEqual(invoice_total([[1000, 10]]), 9500)

    def test_shipping(self):
        self.assertEqual(invoice_total([[1000, 1]]), 1490)

    def test_format(self):
        self.assertEqual(format_cents(1205), "12.05")
""",
    },
    (
        ("prices.py", "count >= REBATE_FROM", "count > REBATE_FROM"),
        ("prices.py", "(100 - REBATE_PERCENT)", "(100 + REBATE_PERCENT)"),
        ("invoice.py", "0 < total < FREE", "0 < total <= FREE"),
        ("invoice.py", ":02d", ""),
    ),
    (
        ("prices", "line_total", [1000, 10], 9500),
        ("prices", "line_total", [333, 11], 3479),
        ("prices", "line_total", [333, 9], 2997),
        ("invoice", "invoice_total", [[[5000, 1]]], 5000),
        ("invoice", "invoice_total", [[[4999, 1]]], 5489),
        ("invoice", "invoice_total", [[]], 0),
        ("invoice", "format_cents", [1205], "12.05"),
        ("invoice", "format_cents", [7], "0.07"),
    ),
)

_ROMAN = Template(
    "Some numbers come back changed after they were written as Roman numerals.",
    {
        "roman.py": '''"""Roman numerals from 1 to 3999."""

SYMBOLS = [
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
    (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
]


def to_roman(number):
    text = ""
    for value, symbol in SYMBOLS:
        while number >= value:
            text += symbol
            number -= value
    return text


def from_roman(text):
    values = {symbol: value for value, symbol in SYMBOLS if len(symbol) == 1}
    total = 0
    for index, letter in enumerate(text):
        value = values[letter]
        if index + 1 < len(text) and values[text[index + 1]] > value:
            total -= value
        else:
            total += value
    return total
''',
        "outline.py": '''from roman import to_roman


def outline(titles):
    """Return numbered titles: "I. first"."""
    return [f"{to_roman(number)}. {title}" for number, title in enumerate(titles, 1)]
''',
        "test_roman.py": """import unittest
from outline import outline
from roman import from_roman, to_roman


class Roman(unittest.TestCase):
    def test_round_trip(self):
        for number in (1, 3, 6, 8, 20, 1666):
            self.assertEqual(from_roman(to_roman(number)), number)

    def test_outline(self):
        self.assertEqual(outline(["a"]), ["I. a"])
""",
    },
    (
        ("roman.py", '(90, "XC")', '(90, "LC")'),
        ("roman.py", "number >= value", "number > value"),
        ("roman.py", "total -= value", "total -= 1"),
        ("outline.py", "enumerate(titles, 1)", "enumerate(titles)"),
    ),
    (
        ("roman", "to_roman", [1994], "MCMXCIV"),
        ("roman", "to_roman", [4], "IV"),
        ("roman", "to_roman", [5], "V"),
        ("roman", "from_roman", ["XLIX"], 49),
        ("roman", "from_roman", ["MCMXCIV"], 1994),
        ("outline", "outline", [["a", "b"]], ["I. a", "II. b"]),
    ),
)

_TEXTS = Template(
    "The report counts words wrongly and its lines are too long.",
    {
        "words.py": '''import re


def words(text):
    """Return the words of a text in lower case; an apostrophe inside belongs to its word."""
    return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower())


def most_common(text, count):
    """Return the most frequent words, equally frequent ones in alphabetical order."""
    counts = {}
    for word in words(text):
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]
''',
        "layout.py": '''def wrap(text, width):
    """Break a text into lines of at most `width` characters; longer words have a line of their own."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    if line:
        lines.append(line)
    return lines
''',
        "test_texts.py": """import unittest
from layout import wrap
from words import most_common, words


class Texts(unittest.TestCase):
    def test_words(self):
        self.assertEqual(words("It's me."), ["it's", "me"])

    def test_most_common(self):
        self.assertEqual(most_common("a b b", 1), ["b"])

    def test_wrap(self):
        self.assertEqual(wrap("aa bb cc", 5), ["aa bb", "cc"])
""",
    },
    (
        ("words.py", "text.lower()", "text"),
        ("words.py", "(-counts[word], word)", "-counts[word]"),
        ("words.py", "counts.get(word, 0) + 1", "1"),
        ("layout.py", "len(line) + 1 + len(word)", "len(line) + len(word)"),
        ("layout.py", "    if line:\n", "    if not lines:\n"),
    ),
    (
        ("words", "words", ["It's ME, 2 times"], ["it's", "me", "2", "times"]),
        ("words", "most_common", ["b a b a c", 2], ["a", "b"]),
        ("words", "most_common", ["z y x", 3], ["x", "y", "z"]),
        ("words", "most_common", ["y x x y y", 1], ["y"]),
        ("words", "most_common", ["B b a", 1], ["b"]),
        ("layout", "wrap", ["aa bb cc", 5], ["aa bb", "cc"]),
        ("layout", "wrap", ["aa bb c", 4], ["aa", "bb c"]),
        ("layout", "wrap", ["abcdefgh i", 3], ["abcdefgh", "i"]),
        ("layout", "wrap", ["", 3], []),
    ),
)

TEMPLATES = (_INTERVALS, _SHOP, _ROMAN, _TEXTS)
