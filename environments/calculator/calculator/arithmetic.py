"""The calculator: exact arithmetic on expressions that a model wrote, never executed as code and bounded in size."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 300
MAX_BITS = 4096
MAX_EXPONENT = 512
# Digits of a result that is neither whole nor a short decimal.
DIGITS = 12

_ALLOWED = re.compile(r"[0-9.,+\-*/%()^\s]+", re.ASCII)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression of numbers, + - * / // % ** (or ^) and parentheses.

    Raises:
        ValueError: it is something else, divides by zero, or it or a value in it is too big.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    # Commas group thousands; a newline would end the expression.
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}\b)", "", " ".join(expression.split())).replace("^", "**")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("this is not an arithmetic expression") from error
    return _value(tree.body, text)


def show(value: Fraction) -> str:
    """Format a number: as an integer, as a decimal if it is exact and short, else as a fraction with a decimal."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**DIGITS % value.denominator == 0:
        sign, scaled = "-" if value < 0 else "", abs(value.numerator) * 10**DIGITS // value.denominator
        whole, decimals = divmod(scaled, 10**DIGITS)
        return f"{sign}{whole}.{decimals:0{DIGITS}d}".rstrip("0")
    try:
        return f"{value} (about {float(value):.{DIGITS}g})"
    except OverflowError:
        return str(value)


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        # From the text, not via float: 0.1 is a tenth here.
        return _bounded(Fraction(text[node.col_offset : node.end_col_offset]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod) and right == 0:
            raise ValueError("division by zero")
        operation = _OPERATIONS.get(type(node.op))
        if operation:
            return _bounded(operation(left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent must be a whole number, {MAX_EXPONENT} at most")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if _bits(base) * abs(exponent.numerator) > MAX_BITS:  # before the work, not after it
        raise ValueError("the number is too big")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError("the number is too big")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
