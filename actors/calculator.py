"""The calculator: an environment that works out what a model writes between `<calc>` and `</calc>`.

Flows in: turns as token ids. Flows out: `<result>36</result>` as token ids. Expressions are never run as code.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from counterflow.actors.environments import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSE = "</calc>"
"""What ends a turn that calls the calculator: it belongs into `sampling.stop`."""

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_LONGEST = 200
"""Characters of an expression."""
_WIDEST = 256
"""Bits of a number on the way, above and below its fraction bar."""
_MOST = 64
"""The largest exponent."""
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """Answers a turn that ends in a call with its result; a turn without a call is the last. Rewards nothing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    async def reset(self, record: dict[str, Any]) -> None:
        """Nothing is kept from one response to the next."""

    async def step(self, turn_token_ids: Sequence[int]) -> Step:
        """Work out the turn's last call."""
        calls = _CALL.findall(str(self._tokenizer.decode(turn_token_ids, skip_special_tokens=True)))
        if not calls:
            return Step(done=True)
        reply = f"<result>{calculate(calls[-1])}</result>"
        return Step(tuple(self._tokenizer.encode(reply, add_special_tokens=False)))


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, worked out in fractions; `error` where it has none, or too large a one."""
    try:
        if len(expression) > _LONGEST:
            return "error"
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            base, exponent = _value(left), _value(right)
            if exponent.denominator != 1 or abs(exponent) > _MOST:
                raise ValueError("an exponent must be a small whole number")
            return _bounded(base ** int(exponent))
        case ast.BinOp(op=operation, left=left, right=right) if type(operation) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(operation)](_value(left), _value(right))))
    raise ValueError("not arithmetic")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _WIDEST:
        raise ValueError("too large a number")
    return value
