"""Grades mathematical answers with math-verify in separate processes, which a hostile text can only end."""

import asyncio
import importlib.util
import json
import math
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from .answers import INVISIBLE, unwrap
from .numbers import is_unit, number_of, split_numbers

WORKER = Path(__file__).with_name("math_worker.py")
MEMORY = 2 << 30

_MAX_NESTING = 50
_MAX_DIGITS = 4
"""Of an exponent and of the number before a factorial."""
_FACTORIAL = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1},}}\s*[)}}]?\s*!|![\s)}}]*!")
_EXPONENT = re.compile(rf"(?:\^|\*\*)[\s{{(+-]*[0-9]{{{_MAX_DIGITS + 1},}}")
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*([0-9]+)[\s})]*(?:\^|\*\*)[\s{(+-]*([0-9]+)[\s})]*(\^|\*\*)?")
_EQUALS = re.compile(
    r"(?<![<>!=:]):?=(?![=>])|(?<![<>!=])==(?![=>])|--?>|[≡→⟶⇒⟹↔⇔⟺]"
    r"|\\(?:equiv|implies|iff|to|in(?![tf])|(?:[Ll]ong)?(?:[Ll]eft)?[Rr]ightarrow)"
)
# What may stand before "= 18": x, x_1, f(3), AB, a + b, (x, y), \\angle ABC, \\vec v, Area. Neither 2x nor x^2.
_NAME = re.compile(
    r"\((?:\s*[A-Za-z]\s*,)+\s*[A-Za-z]\s*\)|\\?(?:(?:angle|overline|text|mathrm|textbf|triangle|ell|operatorname|"
    r"mathbf|boldsymbol|vec|hat|bar)\b\s*)?\{?\|?[A-Za-z][A-Za-z ']{0,30}\|?\}?"
    r"(?:_\{?\w{1,9}\}?)?'*\s*(?:\([^()=^]{1,20}\))?(?:\s*\+\s*[A-Za-z](?:_\{?\w{1,9}\}?)?)*"
)
_RELATION = re.compile(r"\s*(?:[<>≤≥≠]|\\(?:[lgn]eq?|[lg]t|[lg]eqslant|not)(?![A-Za-z]))")
_BASE = re.compile(r"[0-9A-F][)}]?\s*_\s*\{?\s*(?:\\text[a-z]*\s*\{)?\s*(\\?\w{1,9})\s*\}*$")
_FINAL_PERIOD = re.compile(r"(?<!\\right)(?<=[\w)}\]$%])\s*[.,]$")
_DEGREE = re.compile(r"\s*(?:\^\s*)?°")
_REPEATING = re.compile(
    r"([0-9]{0,20})\.(?:([0-9]{0,20})\\(?:overline|bar|dot)\s*(?:\{\s*([0-9]{1,20})\s*\}|([0-9]))|\(([0-9]{1,20})\))"
)
_LIST = re.compile(r"[0-9],\s+[-+]?[0-9]|^\(.*,")
_TUPLE, _SET = (re.compile(rf"(?:\\left\s*)?{bracket}") for bracket in (r"[(\[]", r"\\\{"))
# A set of which an inequality may be another form; (0,1) could also be a point.
_INTERVAL = re.compile(r"[\[\]]|\\infty|\\cup")
# math-verify skips these.
_SKIPPED = re.compile(r"\\(?:[hv]?phantom|[lcvd]?dots|approxeq)")
_MONEY = tuple(map(re.compile, (r"\\\$|\bdollars?\b", r"€|\beuros?\b", "£|pounds", r"¢|\bcents?\b")))
_SEPARATOR = re.compile(r"\s*(?:[,;]|\b(?:or|and)\b|\\text\s*\{\s*,?\s*(?:or|and)\s*\})\s*")
_MEASURES = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inche", "ft foot feet", "yd yard", "mi mile", "s sec second", "min minute", "h hr hour", "day",
        "month", "year yr", "mg milligram", "g gram", "kg kilogram", "lb pound", "oz ounce", "l liter litre",
        "ml milliliter millilitre", "gal gallon", "cent", "dollar", "mph",
    )
    for name in names.split()
}  # fmt: skip
"""Units that other units contain or begin like -> one name; a plural has another s."""
_UNIT = re.compile(
    r"(?:(?<=[0-9})])|(?<=\\pi))(?:\\[,;!: ]|[\s~])*"
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*(?P<wrapped>[A-Za-z][A-Za-z ./]*)\}"
    r"|(?:(?<=[\s~])|(?=[A-Za-z]{2}))(?P<plain>[A-Za-z][A-Za-z ./]*))"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?$"
)
_TEXT = r"\\(?:text[a-z]*|mbox|math(?:rm|it|bf))\s*\{"
_OR = re.compile(rf"{_TEXT}\s*,?\s*(or|and)\s*\}}")
_CONSTANTS = (r"\pi", "π", "e", "i", r"\infty", "∞")
_REMARK = re.compile(rf"[\w)}}\]%|](?:\\[,;:! ]|[\s~])*{_TEXT}(?! (?:or|and) \}})(.*)", re.DOTALL)
_MODULUS = re.compile(r"\s*\\pmod\s*(?:\{[^{}]*\}|[0-9])$")
_ABOUT = re.compile(r"\\approx|≈")
_VARIABLE = re.compile(r"[0-9]([A-Za-z])$")
_LETTER = re.compile(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])")
_IMPLIES = re.compile(r"[-=]>|[→⟶⇒⟹]|\\(?:implies|to|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])")
_PLAIN = (  # what math-verify does not know
    (re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))"), r"\1{\2\3\4}"),
    (re.compile("(⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"), r"^{\1}"),
    (re.compile("([₀₁₂₃₄₅₆₇₈₉]+)"), r"_{\1}"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"(?<![\\A-Za-z])(pi(?![A-Za-z])|sqrt(?=\s*\{))"), r"\\\1"),
)
_SIGNS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "-01234567890123456789") | str.maketrans(
    {
        "√": r"\sqrt",
        "∛": r"\sqrt[3]",
        "∞": r"\infty ",
        "\u222a": r"\cup ",
        "∩": r"\cap ",
        "·": r"\cdot ",
        "∅": r"\emptyset ",
        "¢": r"\text{ cents}",
    }
)
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


@dataclass(frozen=True)
class Verdict:
    """The result of grading one answer.

    `failure` is the reason why it could not be graded: "timeout", "crash", "too long", "too large" or the name of an
    exception. Such an answer is not correct.
    """

    correct: bool
    failure: str | None = None


class GraderBroken(RuntimeError):
    """The grading process does not even start. Not the answer's fault, so no verdict on it."""


class MathGrader:
    """A few processes with math-verify, started when first needed and again after each that died.

    Works in any thread and event loop, and needs no main thread: the limits are the kernel's (see `math_worker`).
    """

    def __init__(self, seconds: float = 5.0, max_chars: int = 1000, workers: int = 4, memory: int = MEMORY) -> None:
        """Make a grader.

        Args:
            seconds: processor time for one answer.
            max_chars: a longer answer is not graded.
            workers: how many processes grade at a time; started as they are needed.
            memory: bytes that each process may address.

        Raises:
            ValueError: a limit that is not positive, or math-verify is not installed.
        """
        if seconds <= 0 or max_chars < 1 or workers < 1:
            raise ValueError(f"seconds ({seconds}), max_chars ({max_chars}) and workers ({workers}) must be positive")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("math-verify is not installed; run `uv pip install math-verify`")
        self._seconds = seconds
        self._max_chars = max_chars
        self._memory = memory
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-grader")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: list[subprocess.Popen[str]] = []
        self._is_closed = False

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Return whether `answer` equals `gold`; both are what stands in a box.

        Takes `seconds` of processor time at most, and those before it in the queue as much again.

        Raises:
            GraderBroken: the process does not start.
        """
        gold, answer = map(plain_latex, (gold, answer))
        if same_text(gold, answer) or same_text(unwrap(gold), unwrap(answer)):
            return Verdict(correct=True)
        if not answer:
            return Verdict(correct=False)
        if len(answer) > self._max_chars:
            return Verdict(correct=False, failure="too long")
        if ((variable := _VARIABLE.search(gold)) and variable[1] not in answer) or differ_in_signs(gold, answer):
            return Verdict(correct=False)
        (gold, unit), (answer, given) = split_unit(gold), split_unit(answer)
        if unit and given and not is_same_unit(unit, given):
            return Verdict(correct=False)
        numbers = [split_numbers(text) for text in (gold, answer)]
        pairs = ((gold, answer), (answer, gold))
        if any(number_of(one) is not None and _LIST.search(other) for one, other in pairs):
            return Verdict(correct=False)
        if all(len(number) == 1 for number in numbers) and len({"".join(unit.split()) for [(_, unit)] in numbers}) == 1:
            [(right, _)], [(value, _)] = numbers
            if right == value or right.denominator == value.denominator == 1:
                return Verdict(correct=right == value)
        if any(re.search(r"[0-9]\s+[0-9]", text) for text in (gold, answer)):  # math-verify joins or multiplies them
            return Verdict(correct=False)
        # math-verify ignores both.
        bases = [match and match[1] for match in map(_BASE.search, (gold, answer))]
        if bases[1] not in (None, bases[0], "10" if bases[0] is None else "") or (
            _RELATION.match(answer) and not _RELATION.match(gold)
        ):
            return Verdict(correct=False)
        if is_too_large(answer):
            return Verdict(correct=False, failure="too large")
        if not _MODULUS.search(gold):
            answer = _MODULUS.sub("", answer)
        answers = answer_parts(gold, answer)
        if any(remark(part) not in ("", remark(gold)) for part in answers):
            return Verdict(correct=False)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, gold, answers)

    def _ask(self, gold: str, answers: list[str]) -> Verdict:
        """Run in one of the threads, each of which owns a process."""
        worker: subprocess.Popen[str] | None = getattr(self._own, "worker", None)
        if worker is None or worker.poll() is not None:
            worker = self._own.worker = _start(self._memory)
            with self._lock:
                self._workers.append(worker)
                if self._is_closed:  # while it was started
                    worker.kill()
        request = {
            "gold": gold,
            "answers": answers,
            "seconds": self._seconds,
            "relations": bool(_INTERVAL.search(gold)),
        }
        assert worker.stdin and worker.stdout
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            reply = worker.stdout.readline()
        except OSError:
            reply = ""
        if not reply:
            self._workers.remove(worker)
            self._own.worker = None
            timed_out = _end(worker) == -signal.SIGPROF
            return Verdict(correct=False, failure="timeout" if timed_out else "crash")
        verdict = json.loads(reply)
        return Verdict(verdict["correct"], verdict.get("failure"))

    def close(self) -> None:
        """End the processes; no answer can be graded afterwards. They also exit when this program dies."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()  # a thread that waits for its verdict reads the end of its output
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            _end(worker)
        self._workers.clear()


def plain_latex(text: str) -> str:
    """Return an answer without colors, sizes and a final period, and with LaTeX instead of other signs."""
    text = _FINAL_PERIOD.sub("", INVISIBLE.sub("", text).strip())
    text = _REPEATING.sub(_as_fraction, _DEGREE.sub(r"^\\circ ", text))
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return _OR.sub(r"\\text{ \1 }", text.translate(_SIGNS))


def differ_in_signs(gold: str, answer: str) -> bool:
    """Whether something differs that math-verify skips: brackets, currencies, case or order of letters, dots."""
    texts = (gold, answer)
    if any(_TUPLE.match(one) and _SET.match(other) for one, other in (texts, texts[::-1])):
        return True
    money, others = ({number for number, sign in enumerate(_MONEY) if sign.search(text)} for text in texts)
    if (money and others and not money & others) or (_SKIPPED.search(answer) and not _SKIPPED.search(gold)):
        return True
    if all(re.fullmatch("[A-Z]{3,}", unwrap(text).strip()) for text in texts):
        return True  # words: not equal as text
    return gold != answer and gold.casefold() == answer.casefold() and _LETTER.search(gold) is not None


def same_text(gold: str, answer: str) -> bool:
    """Compare without any mathematics: what math-verify cannot parse may still be the same.

    Spaces count between letters and digits, and behind the comma of a list: 1 2 is not 12, and 1, 234 is not 1,234.
    """
    gold, answer = (re.sub(r"(?<!\w)(?<![0-9],) | (?!\w)", "", " ".join(text.split())) for text in (gold, answer))
    return gold == answer != ""


def answer_parts(gold: str, answer: str) -> list[str]:
    r"""Return the sides of an equation without mere names: 18 of `x = 18`, and 36/2 and 18 of `x = 36/2 = 18`.

    Arrows separate sides too, as in `36/2 \Rightarrow 18`. All sides must be the answer. math-verify looks at the last
    one only, so `3 = 4` would be 4. Values of one name, such as `x = 3, x = 4`, are a list: 3, 4.
    An equation stays whole if `gold` is one, unless it has more sides.
    """
    num_right, num_given = (len(_EQUALS.split(text)) for text in (gold, answer))
    if num_right > 1 and (num_given <= num_right or _SEPARATOR.search(gold)):
        return [answer]
    sides = [side.strip() for side in _ABOUT.split(answer.lstrip(" ="))]
    if len(sides) > 1:
        values = [side for side in sides if side and not _is_name(side)] or [""]
        if not all(_is_rounded(values[0], side) for side in values[1:]):
            return values
        sides = values
    answer = sides[0]
    *steps, last = _IMPLIES.split(answer)
    if "=" in last and all(map(_is_to_solve, steps)):
        answer = last
    equations = [_EQUALS.split(part) for part in _SEPARATOR.split(answer)]
    names = {sides[0].strip() for sides in equations}
    are_values = all(len(sides) == 2 for sides in equations) and all(map(_NAME.fullmatch, names))
    if len(equations) > 1 == len(names) and are_values:
        return [", ".join(value.strip() for _, value in equations)]
    parts = [part.strip() for part in _EQUALS.split(answer)]
    first = [] if _NAME.fullmatch(parts[0]) else parts[:1]
    is_letter = re.fullmatch(r"\\?[a-z]+", gold) is not None
    return [*first, *(part for part in parts[1:] if is_letter or not _is_name(part))] or parts


def _is_name(text: str) -> bool:
    return text not in _CONSTANTS and _NAME.fullmatch(text) is not None


def _is_rounded(value: str, about: str) -> bool:
    """Whether the second of two numbers is the first with fewer digits; also if one is no number."""
    exact, rounded = number_of(value), number_of(about)
    if exact is None or rounded is None:
        return True
    decimals = re.match(r"[0-9]*\.([0-9]*)", about)
    return abs(exact - rounded) < max(Fraction(1, 10 ** len(decimals[1] if decimals else "")), abs(exact) / 1000)


def _is_to_solve(equation: str) -> bool:
    """Whether this is an equation such as 2x = 8, and not x = 4."""
    sides = equation.split("=")
    return (
        len(sides) == 2 and re.search("[a-z]", equation) is not None and not any(map(_is_name, map(str.strip, sides)))
    )


def remark(answer: str) -> str:
    r"""Return the words behind a value that are no unit, such as `wrong` of `4 \text{ (wrong)}`; "" if there are none.

    math-verify drops them, and all that follows.
    """
    match = _REMARK.search(answer)
    words = "" if match is None else re.sub(r"\\[A-Za-z]+|[\\{}]", " ", match[1])
    return "" if is_unit(words) else "".join(words.lower().split())


def split_unit(answer: str) -> tuple[str, str]:
    r"""Return an answer without its unit, and the unit as words: 5 and `cm 2` of `5 \text{ cm}^2`; "" if it has none.

    math-verify drops some units and multiplies by others.
    """
    match = _UNIT.search(answer)
    if match is None:
        return answer, ""
    value, words = answer[: match.start()], (match["wrapped"] or match["plain"]).replace(".", "").lower().split()
    calculation = re.sub(r"\\[A-Za-z]+", "", _EQUALS.split(value)[-1])
    if re.search(r"[A-Za-z]", calculation) or not is_unit((match["wrapped"] or match["plain"]).replace(".", "")):
        return answer, ""
    powers = [match["power"] or "", *(_POWERS.get(word, "") for word in words)]
    return value, " ".join([*(word for word in words if word not in _POWERS), "".join(powers)]).strip()


def is_same_unit(one: str, other: str) -> bool:
    """Whether two units (see `split_unit`) are equal or one abbreviates the other, as cm, ft and mph do."""
    first, second = (
        {_MEASURES.get(word, _MEASURES.get(word.removesuffix("s"), word)) for word in text.split()}
        for text in (unit.replace("/", " per ").replace("mph", "mi per h") for unit in (one, other))
    )
    if (first | second) & _MEASURES.keys():
        return first == second
    if first <= second or second <= first:  # ways, possible ways
        return True
    short, long = sorted((one.replace(" ", ""), other.replace(" ", "")), key=len)
    rest = iter(long)
    return short[0] == long[0] and all(letter in rest for letter in short)


def _as_fraction(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction, which math-verify does not know."""
    whole, fixed = match[1], match[2] or ""
    repeating = match[3] or match[4] or match[5]
    ends = int(f"{whole}{fixed}{repeating}") - int(f"{whole}{fixed}" or "0")
    return f"\\frac{{{ends}}}{{{'9' * len(repeating)}{'0' * len(fixed)}}}"


def is_too_large(answer: str) -> bool:
    """Whether sympy would compute with more digits than any answer has, or nest too deeply.

    Only a cheap look at common forms, so that these do not keep other answers waiting. The limit of the processor time
    ends all others.
    """
    depth = deepest = 0
    for character in answer:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    towers = (
        len(base) > _MAX_DIGITS
        or len(power) > _MAX_DIGITS
        or third
        or int(power) * math.log10(int(base) or 1) > _MAX_DIGITS
        for base, power, third in _TOWER.findall(answer)
    )
    return deepest > _MAX_NESTING or bool(_FACTORIAL.search(answer) or _EXPONENT.search(answer)) or any(towers)


def _start(memory: int) -> "subprocess.Popen[str]":
    # -I and the file itself: neither the working directory nor this package's import decides what runs there.
    command = [sys.executable, "-I", str(WORKER), str(memory)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert worker.stdout
    if "ready" not in worker.stdout.readline():
        raise GraderBroken(f"the grading process ended with exit status {worker.wait()}; run {' '.join(command)}")
    return worker


def _end(worker: "subprocess.Popen[str]") -> int:
    """Take the exit status of a process that has ended or is about to; negative is the signal that ended it."""
    try:
        status = worker.wait(timeout=5)
    except subprocess.TimeoutExpired:
        worker.kill()
        status = worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # what was still to be written has no reader any more
    return status
