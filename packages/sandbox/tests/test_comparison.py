"""Outputs and values that are equal to what is expected, and those that are not."""

import json
import math

import pytest
from tests.support.isolation import needs_isolation

from prime_rl_sandbox import plain_values
from prime_rl_sandbox.comparison import is_equal, is_equal_value
from prime_rl_sandbox.execution import ExecutionResult, TestCase, Verdict, read_call_result
from prime_rl_sandbox.sandbox import Sandbox

EQUAL_TEXT = [
    ("1000.0000001 a", "1000 a"), ("True", "True\n"), ("3\n", "3"), ("3\r\n4\r\n", "3\n4"), ("\n3\n\n", "3"),
    ("1 2 3 ", "1 2 3"), ("1  2", "1 2"), ("   5", "5"), (" 1\n 2", "1\n2"), ("  *\n ***\n*****", "  *\n ***\n*****"),
    ("0.3333333", "0.33333333333"), ("2.0", "2"), ("2", "2.0"), ("1.9999999999", "2"), ("1e+18", "1000000000000000000"),
    ("1e-05", "0.00001"), (".5", "0.5"), ("-0.0", "0.0"), ("5.", "5"), ("123456.789012", "123456.789013"),
    ("0.0", "1e-12"), ("3.14 yes", "3.140000001 yes"), ("9" * 400, "9" * 400), ("nan", "nan"), ("inf", "inf"), ("", ""),
    ("é 1.50", "é 1.5"), ("1\n\n2", "1\n\n2"), ("1\n  \n2", "1\n\n2"),
]  # fmt: skip
UNEQUAL_TEXT = [
    ("1_000", "1000"), ("\uff11\uff10", "10"), ("nan", "1"), ("1e400", "1e308"), ("True", "1"),
    ("1000000000", "1000000007"), ("1000000006", "1000000007"), ("1000000000.0", "1000000007"),
    ("1000000006.5", "1000000007"), ("333333333333333312", "333333333333333333"),
    ("333333333333333312.0", "333333333333333333"), ("3.3333333333333331e+17", "333333333333333333"),
    ("1011010000", "1011010011"), ("1", "000000001"), ("01", "1"), ("+1", "1"), ("inf", "9" * 309),
    ("Infinity", "9" * 400), ("1" * 400, "9" * 400), ("1e999", "9" * 400), ("inf", "nan"), ("-inf", "inf"),
    ("inf", "1.5"), ("1e9999", "1.5"), ("9" * 1_100_000 + ".5", "1.5"), ("1 2 3 4", "1 2\n3 4"), ("1\n2", "1 2"),
    ("1\n2", "1\n\n2"), ("1 2", "1 2 3"), ("12", "1 2"), ("*\n***\n*****", "  *\n ***\n*****"), ("yes", "Yes"),
    ("0.3334", "0.3333"), ("1000000000", "1000000000.5"), ("2.1", "2"), ("2.00001", "2"), ("-1.5", "1.5"),
    ("192.168.1.10", "192.168.1.1"), ("0x10", "16"), ("", "0"), ("0", ""),
]  # fmt: skip


BIG = math.factorial(200)
EQUAL_VALUES = [
    (BIG, BIG), (10**5000, 10**5000), (0.1 + 0.2, 0.3), (3, 3.0), (1.9999999999, 2), ([1, (2, 3)], [1, [2, 3]]),
    ({"a": [0.1 + 0.2]}, {"a": [0.3]}), (math.nan, math.nan), (math.inf, math.inf), (None, None), ("a b", "a b"),
    ({1, 2}, {2, 1}), (True, True),
]  # fmt: skip
UNEQUAL_VALUES = [
    (1000000006, 1000000007), (1e9, 1000000007), (333333333333333312.0, 333333333333333333), (BIG + 1, BIG),
    (float(BIG // 10**100), BIG), (math.inf, BIG), (BIG, math.inf), (math.inf, 1.5), (-math.inf, math.inf),
    (math.nan, 1), (1, math.nan), (True, 1), (1, True), ([True], [1]), ({"a": True}, {"a": 1}), ("1", 1),
    ("1.50", "1.5"), ("a  b", "a b"), ("ab ", "ab"), ([1, 2], [1, 2, 3]), ({"a": 1}, {"a": 1, "b": 2}), (None, 0),
    ([], None), (2.1, 2),
]  # fmt: skip


@pytest.mark.parametrize(("compare", "equal", "unequal"), [
    (is_equal, EQUAL_TEXT, UNEQUAL_TEXT),
    (is_equal_value, EQUAL_VALUES, UNEQUAL_VALUES),
], ids=["text", "values"])  # fmt: skip
def test_outputs_are_equal_up_to_rounding_with_tolerance_only(compare, equal, unequal):
    assert [pair for pair in equal if not compare(*pair, "tolerance")] == []
    assert [pair for pair in unequal if compare(*pair, "tolerance")] == []
    assert [pair for pair in unequal if compare(*pair, "exact")] == []


def test_is_equal_unknown_mode_raises():
    for output, expected in (("a", "a"), (1, 1)):
        with pytest.raises(ValueError, match="unknown"):
            is_equal(output, expected, "about")


def test_plain_values_cross_as_json():
    for value in (BIG, 10**5000, -(10**5000), [10**5000, {1: 2}], 1 + 2j, b"a", {(1, 2)}):
        assert plain_values.decode_value(json.loads(json.dumps(plain_values.encode_value(value)))) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "complex", "items": [1' + "0" * 400 + ", 0]}", '{"type": "complex", "items": [1, 2, 3]}',
        '{"type": "complex", "items": ["a"]}', '{"type": "int", "items": ["zz"]}', '{"type": "int", "items": []}',
        '{"type": "int", "items": [5]}', '{"type": "bytes", "items": [300]}',
        '{"type": "bytes", "items": [1' + "0" * 400 + "]}", '{"type": "dict", "items": [1]}',
        '{"type": "dict", "items": [[[1], 2]]}', '{"type": "set", "items": [[1]]}', "[" * 100_000, "1" * 5000, "\xff",
        "",
    ],
)  # fmt: skip
def test_read_call_result_hostile_values_raise_value_error(text):
    result = ExecutionResult(Verdict.OK, files={".function_result": text.encode("latin-1")})
    with pytest.raises(ValueError):
        read_call_result(result)


HOSTILE_RESULT = """
def f():
    import os
    open(".function_result", "w").write({text!r})
    os._exit(0)
"""
STOP_TESTS = [
    "assert all(map(lambda x: f(x) == x * x, [1, 2, 3]))",
    "for got, x in zip(map(f, [1, 2, 3]), [1, 2, 3]):\n    assert got == x * x",
    "assert not any(map(lambda x: f(x) != x * x, [1, 2]))",
    "assert list(map(f, [])) == [] and list(map(f, [1])) in ([1], [])",
    "assert sum(map(f, [1, 2])) in (0, 5)",
]


@needs_isolation
async def test_execute_code_compares_large_and_hostile_values_without_raising():
    text = '{"type": "complex", "items": [1' + "0" * 400 + ", 0]}"
    factorial = "import math\ndef f(): return math.factorial(200)"
    cases = [
        (factorial, TestCase(function="f", expected=BIG, compare="tolerance"), True),
        (factorial, TestCase(function="f", expected=BIG + 1, compare="tolerance"), False),
        ("def f(): return 10 ** 5000", TestCase(function="f", expected=10**5000), True),
        ("def f(): return float('inf')", TestCase(function="f", expected=BIG, compare="tolerance"), False),
        (HOSTILE_RESULT.format(text=text), TestCase(function="f", expected=1, compare="tolerance"), False),
        ("def f(): return 'text'", TestCase(function="f", compare=lambda output, _: output[0] / 2 > 0), False),
        ("print(int(10**18/3))", TestCase("1", "333333333333333333", compare="tolerance"), False),
        ("print('inf')", TestCase("1", "9" * 400, compare="tolerance"), False),
        ("print(1/3)", TestCase("1", "0.33333333", compare="tolerance"), True),
    ]
    async with Sandbox(num_jails=1) as sandbox:
        for code, test, passes in cases:
            [result] = await sandbox.execute_code(code, [test], timeout_ms=5000)
            assert result.passed is passes, (code, result)


@needs_isolation
async def test_run_asserts_stop_iteration_of_the_code_ends_no_loop_of_a_test():
    async with Sandbox(num_jails=1) as sandbox:
        for tests in STOP_TESTS:
            for kind in ("StopIteration", "StopAsyncIteration"):
                wrong = await sandbox.run_asserts(f"def f(x): raise {kind}", tests, ["f"])
                assert not wrong.passed, (kind, tests)
            assert (await sandbox.run_asserts("def f(x): return x * x", tests, ["f"])).passed, tests
