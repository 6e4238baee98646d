"""The built-in calculator: arithmetic and nothing else.

An expression is parsed, never evaluated as Python: what is not a number, an operator or one of the functions below is refused.
The work is bounded before it is done, by the length of the expression and the size of every intermediate value, so that no
expression takes noticeable time or memory.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable

MAX_EXPRESSION_CHARACTERS, MAX_RESULT_DIGITS = 500, 1000
"""Characters of an expression, and decimal digits of a whole number."""
MAX_RESULT_BITS = math.ceil(MAX_RESULT_DIGITS * math.log2(10))

Number = int | float


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression exactly where it can.

    Args:
        expression: Numbers with + - * / // % **, brackets, and the functions sqrt, abs, round, min, max. Example: (12 + 3.5) * 4
    """
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_EXPRESSION_CHARACTERS} are allowed")
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python about what a model wrote, such as 12if
            tree = ast.parse(expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return shown(evaluate(tree.body))


def shown(value: Number) -> str:
    """Whole numbers without a point; others to 12 digits."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.12g}"


def evaluate(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right)))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    ):
        return _bounded(FUNCTIONS[node.func.id](*map(evaluate, node.args)))
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic; there are + - * / // % **, {', '.join(FUNCTIONS)}")


def _bounded(value: Number) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is too large")
    if isinstance(value, int) and value.bit_length() > MAX_RESULT_BITS:
        raise ValueError(f"the result has more than {MAX_RESULT_DIGITS} digits")
    return value


def _power(base: Number, exponent: Number) -> Number:
    """The size of the result is known before it is worked out."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and (int(base).bit_length() - 1) * abs(exponent) > MAX_RESULT_BITS:
        raise ValueError(f"the result has more than {MAX_RESULT_DIGITS} digits")
    found: Number = base**exponent
    return found


def _round(value: Number, digits: Number = 0) -> Number:
    """Bounded, because rounding a whole number to -n places works out the n-th power of ten."""
    if not isinstance(digits, int) or abs(digits) > 20:
        raise ValueError("round takes a whole number of places from -20 to 20")
    return round(value, digits)


def _square_root(value: Number) -> Number:
    if isinstance(value, int) and value >= 0 and math.isqrt(value) ** 2 == value:
        return math.isqrt(value)
    return math.sqrt(value)


SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": _square_root,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
}
