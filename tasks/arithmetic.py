"""For graders: the value of an arithmetic expression that a model wrote, without `eval` and within limits.

A model under RL may write anything, for example `9**9**9**9` or a thousand brackets. So the length of the text, the
nesting and every intermediate number are limited. An expression beyond a limit has no value.
"""

import re
from fractions import Fraction

LONGEST = 200  # characters
DEEPEST = 30  # operators and brackets that wait for their right-hand side
BITS = 512  # of every numerator and denominator, intermediate ones included
TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|\*\*|[-+*/^()])", re.ASCII)
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "**": 4, "^": 4}  # a minus sign before a number binds with 3


class _NoNumber(ValueError):
    """The text has no value within the limits."""


def evaluate(text: str) -> Fraction | None:
    """The exact value of an expression in + - * / ** ^ ( ) and decimal numbers, or None where it has none.

    None also where it is longer than 200 characters, nests deeper than 30, or reaches numbers of over 512 bits.
    """
    try:
        tokens = _tokens(text)
        value = _expression(tokens, 0, 0)
        if tokens:
            raise _NoNumber("something follows the expression")
    except (_NoNumber, ZeroDivisionError):
        return None
    return value


def _tokens(text: str) -> list[str]:
    """The tokens in reverse order, so that pop() gives the next one."""
    if len(text) > LONGEST:
        raise _NoNumber("too long")
    text, place, found = text.strip(), 0, []
    while place < len(text):
        match = TOKEN.match(text, place)
        if not match:
            raise _NoNumber(f"{text[place]!r} is not allowed")
        found.append(match[1])
        place = match.end()
    return found[::-1]


def _expression(tokens: list[str], least: int, depth: int) -> Fraction:
    """Precedence climbing: operators that bind at least as tightly as `least`."""
    if depth > DEEPEST:
        raise _NoNumber("too deep")
    left = _operand(tokens, depth + 1)
    while tokens and BINDS.get(tokens[-1], -1) >= least:
        operator = tokens.pop()
        tighter = BINDS[operator] + (operator not in ("**", "^"))  # powers group from the right
        left = _apply(operator, left, _expression(tokens, tighter, depth + 1))
    return left


def _operand(tokens: list[str], depth: int) -> Fraction:
    token = tokens.pop() if tokens else ""
    if token in ("-", "+"):
        value = _expression(tokens, 3, depth)
        return -value if token == "-" else value
    if token == "(":
        value = _expression(tokens, 0, depth)
        if not tokens or tokens.pop() != ")":
            raise _NoNumber("a bracket stays open")
        return value
    if not token or token in BINDS or token == ")":
        raise _NoNumber("a number is missing")
    return _bounded(Fraction(token.rstrip(".")))


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    if operator == "+":
        return _bounded(a + b)
    if operator == "-":
        return _bounded(a - b)
    if operator == "*":
        return _bounded(a * b)
    if operator == "/":
        return _bounded(a / b)
    size = max(abs(a.numerator).bit_length(), a.denominator.bit_length())
    if b.denominator != 1 or (size - 1) * abs(b.numerator) > BITS:  # checked before it is computed
        raise _NoNumber("a root, or a power that is too large")
    return _bounded(a**b.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > BITS:
        raise _NoNumber("too large")
    return value
