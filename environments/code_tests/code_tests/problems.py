"""Problems with their tests, from rows of HumanEval, MBPP, APPS and LiveCodeBench, or generated from a seed."""

import ast
import base64
import builtins
import json
import pickletools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .environment_tools.rows import Row, text_of

STYLES = ("sentences", "notation")
"""How generated problems are worded."""


@dataclass(frozen=True)
class Case:
    """A test of a program: text on stdin and stdout, or a call of a function and its value."""

    input: str = ""
    expected: Any = ""
    function: str | None = None
    args: Sequence[Any] = ()


@dataclass(frozen=True)
class Problem:
    """A question and its tests.

    Attributes:
        cases: inputs with expected outputs.
        asserts: blocks of assert statements.
        functions: names of the functions that the tests call.
        setup: definitions that the asserts need.
        prefix: goes before the code of a reply.
        suffix: goes behind it.
    """

    question: str
    cases: tuple[Case, ...] = ()
    asserts: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    setup: str = ""
    prefix: str = ""
    suffix: str = ""


# The imports and the recursion limit of LiveCodeBench's own harness: its starter code uses names such as `List`.
# builtins goes last, because others shadow `open` and `pow`.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_IMPORTS = "".join(f"from {name} import *\n" for name in _MODULES) + "".join(f"import {name}\n" for name in _MODULES)
_IMPORTS += "sys.setrecursionlimit(50_000)\n_imported = dict(globals())\n"
# The form of LeetCode: the function is a method of a class. It keeps its name for itself, because a method `sum` may
# call `sum`. And an import is no solution: `math` has a `gcd`.
_TESTED = """

if hasattr(globals().get("Solution"), "{name}"):
    _tested_{name} = Solution().{name}
elif globals().get("{name}") is not _imported.get("{name}"):
    _tested_{name} = {name}
"""
# The tests of HumanEval+ import numpy for two types and one function.
_NUMPY = """
import sys, types
_numpy = types.ModuleType("numpy")
_numpy.ndarray, _numpy.float64, _numpy.float32 = type("ndarray", (), {}), float, float
def _allclose(a, b, rtol=1e-05, atol=1e-08):
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_allclose(x, y, rtol, atol) for x, y in zip(a, b))
    return a == b or abs(a - b) <= atol + rtol * abs(b)
_numpy.allclose = _allclose
sys.modules.setdefault("numpy", _numpy)
"""


def read_problem(row: Row) -> Problem:
    """Return the problem of a row of any of the known forms.

    Raises:
        ValueError: the form is unknown, or there are no tests.
    """
    if "entry_point" in row and "test" in row:
        return _read_humaneval(row)
    if "test_list" in row:
        return _read_mbpp(row)
    question = text_of(row, "question", "question_content", "prompt")
    try:
        cases = _read_cases(row)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"malformed tests: {error!r}") from None
    if row.get("starter_code"):
        question += f"\n\nStart with this code:\n```python\n{row['starter_code']}\n```"
    if not cases:
        raise ValueError("no tests: need `tests`, `input_output`, `public_test_cases`, `test_list`, or `test`")
    functions = {case.function for case in cases if case.function}
    if wrong := [name for name in functions if not name.isidentifier()]:
        raise ValueError(f"{wrong[0]!r:.80} is no name of a function")
    if not functions and not row.get("starter_code"):
        return Problem(question, tuple(cases))
    names = sorted(functions)
    suffix = "".join(_TESTED.format(name=name) for name in names)
    tested = tuple(replace(case, function=f"_tested_{case.function}") if case.function else case for case in cases)
    return Problem(question, tested, functions=tuple(names), prefix=_IMPORTS, suffix=suffix)


def make_problems(seed: int, part: str, count: int, style: str = "sentences") -> Iterator[Problem]:
    """Yield small problems about linear functions, the same for the same seed.

    Args:
        seed: seed of the problems.
        part: separates training and evaluation.
        count: number of problems.
        style: one of `STYLES`. "sentences" asks for a function or a program, "notation" is only "f(x)=3x-7".
    """
    source = Random(f"code_tests {part} {seed}")
    make = _describe_in_notation if style == "notation" else _describe_in_sentences
    for _ in range(count):
        yield make(source)


def _describe_in_sentences(source: Random) -> Problem:
    factor, summand = source.randint(2, 9), source.randint(1, 99)
    points = source.sample(range(-50, 50), 4)
    rule = f"{factor} times its argument plus {summand}"
    if source.random() < 0.5:
        cases = [Case(function="f", args=[x], expected=factor * x + summand) for x in points]
        return Problem(f"Write a Python function f(x) that returns {rule}.", tuple(cases))
    cases = [Case(f"{x}\n", f"{factor * x + summand}\n") for x in points]
    question = "Write a Python program that reads an integer from standard input and prints"
    return Problem(f"{question} {rule.replace('its argument', 'it')}.", tuple(cases))


def _describe_in_notation(source: Random) -> Problem:
    """The first test only needs the right summand, so that half a solution earns half a reward."""
    factor, summand = (source.randrange(10 ** (digits - 1), 10**digits) for digits in source.choices((1, 2, 3), k=2))
    summand *= source.choice((-1, 1))
    cases = [Case(function="f", args=[x], expected=factor * x + summand) for x in (0, source.randint(2, 9))]
    return Problem(f"f(x)={factor}x{summand:+}", tuple(cases))


def _read_humaneval(row: Row) -> Problem:
    prompt, name = text_of(row, "prompt"), text_of(row, "entry_point")
    question = f"Complete this Python code. Repeat it in full.\n\n```python\n{prompt}```"
    test = f"{text_of(row, 'test')}\ncheck({name})"
    if "import numpy" in test:
        test = _NUMPY + test
    return Problem(question, (), (test,), (name,), prompt, prompt + "\n\n\n")


def _read_mbpp(row: Row) -> Problem:
    tests = [str(test) for test in row["test_list"]]
    functions = tuple(dict.fromkeys(name for test in tests for name in _called_names(test)))
    if not functions:
        raise ValueError("`test_list` calls no function")
    setup = str(row.get("test_setup_code") or "\n".join(row.get("test_imports") or ()))
    question = text_of(row, "text", "prompt")
    return Problem(f"{question}\n\nThe code should pass:\n{tests[0]}", (), tuple(tests), functions, setup)


def _called_names(test: str) -> list[str]:
    """Return the functions that a test calls and that Python does not have."""
    try:
        nodes = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    except SyntaxError:
        raise ValueError(f"`test_list` is not Python: {test[:60]!r}") from None
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return [name for name in names if not hasattr(builtins, name)]


def _read_cases(row: Row) -> list[Case]:
    if row.get("public_test_cases"):
        return _read_livecodebench(row)
    for name in ("tests", "input_output"):
        if row.get(name):
            value = json.loads(row[name]) if isinstance(row[name], str) else row[name]
            function = row.get("fn_name") or row.get("entry_point")
            return _read_columns(value) if isinstance(value, dict) else [_read_case(case, function) for case in value]
    return []


def _read_livecodebench(row: Row) -> list[Case]:
    """Read public and private tests; functional ones have a JSON value per argument and line."""
    tests = [*_read_tests(row["public_test_cases"]), *_read_tests(row.get("private_test_cases") or [])]
    metadata = json.loads(row["metadata"]) if isinstance(row.get("metadata"), str) else row.get("metadata") or {}
    cases = []
    for test in tests:
        if test.get("testtype") != "functional":
            cases.append(_read_case(test, None))
            continue
        if not (name := metadata.get("func_name")):
            raise ValueError("a functional test needs `func_name` in `metadata`")
        args = [json.loads(line) for line in test["input"].split("\n")]
        cases.append(Case(function=name, args=args, expected=json.loads(test["output"])))
    return cases


def _read_tests(value: Any) -> list[dict[str, Any]]:
    """Read a list, its JSON, or the base64 of a compressed pickle of its JSON, as the data set has private tests."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        try:
            pickled = zlib.decompress(base64.b64decode(value, validate=True))
            # The first text in the pickle, without executing it.
            value = next(text for code, text, _ in pickletools.genops(pickled) if "UNICODE" in code.name)
        except (ValueError, zlib.error, StopIteration) as error:
            raise ValueError(f"`private_test_cases` is neither JSON nor its compressed form: {error}") from None
    tests: list[dict[str, Any]] = json.loads(value) if isinstance(value, str) else value
    return tests


def _read_columns(value: dict[str, Any]) -> list[Case]:
    """Read the form of APPS: lists of inputs and outputs, with `fn_name` for calls."""
    pairs = list(zip(value["inputs"], value["outputs"], strict=True))
    if not (function := value.get("fn_name")):
        return [Case(_as_text(given), _as_text(expected)) for given, expected in pairs]
    # APPS wraps the values of functions in a list of one.
    return [
        Case(function=function, args=given, expected=out[0] if isinstance(out, list) and len(out) == 1 else out)
        for given, out in pairs
    ]


def _read_case(case: dict[str, Any], function: str | None) -> Case:
    if "args" in case:
        name = case.get("function") or function
        if not name:
            raise ValueError("a test with `args` needs `function`")
        return Case(function=name, args=case["args"], expected=case["expected"])
    expected = case["output"] if "output" in case else case.get("expected")
    if expected is None:
        raise ValueError("a test needs `output` or `expected`")
    return Case(_as_text(case.get("input", "")), _as_text(expected))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))
