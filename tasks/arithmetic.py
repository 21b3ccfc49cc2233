"""The value of an arithmetic expression that a model wrote, for graders: without `eval`, and bounded.

A model under RL writes whatever pays, `9**9**9**9` and a thousand brackets included. So the text, the nesting and every
number on the way are limited, and what goes beyond is no number.
"""

import re
from fractions import Fraction

LONGEST = 200  # characters
DEEPEST = 30  # operators and brackets that wait for their right-hand side
BITS = 512  # of a numerator or denominator on the way
TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|\*\*|[-+*/^()])", re.ASCII)
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "**": 4, "^": 4}  # a minus sign before a number binds with 3


class _NoNumber(ValueError):
    """The text has no value that is worth computing."""


def evaluate(text: str) -> Fraction | None:
    """The exact value of an expression in + - * / ** ^ ( ) and decimal numbers, or None where it has none.

    None also where it is longer than 200 characters, nests deeper than 30, or passes numbers of over 512 bits.
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
    """Last first, so that the next one is popped from the end."""
    if len(text) > LONGEST:
        raise _NoNumber("too long")
    text, place, found = text.strip(), 0, []
    while place < len(text):
        match = TOKEN.match(text, place)
        if not match:
            raise _NoNumber(f"what is {text[place]!r}?")
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
    if b.denominator != 1 or (size - 1) * abs(b.numerator) > BITS:  # seen before it is computed
        raise _NoNumber("a root, or a power that is too large")
    return _bounded(a**b.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > BITS:
        raise _NoNumber("too large")
    return value
