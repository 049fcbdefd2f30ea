"""Arithmetic of a shell: `$((a * (b + 2)))`, in integers."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(?:(\d+)|(\$?\{?[A-Za-z_]\w*\}?)|(\*\*|[-+*/%()]))")
MAX_DEPTH = 16
"""Of variables that name variables, and of brackets."""
MAX_EXPONENT = 64


def calculate(text: str, variable: Callable[[str], str | None], depth: int = 0) -> int | None:
    """The value of an expression of + − × ÷ % ** and brackets; None when a variable is not known, or for anything else."""
    tokens = _tokens(text)
    if tokens is None or depth > MAX_DEPTH:
        return None
    parser = _Parser(tokens, variable, depth)
    try:
        value = parser.sum()
    except (ValueError, ZeroDivisionError, IndexError, RecursionError):
        return None
    return None if parser.tokens else value


def _tokens(text: str) -> list[str] | None:
    found, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        found.append(match.group().strip())
        at = match.end()
    return found


class _Parser:
    """Sums of products of factors. Raises ValueError and IndexError."""

    def __init__(self, tokens: list[str], variable: Callable[[str], str | None], depth: int) -> None:
        self.tokens, self.variable, self.depth = tokens, variable, depth

    def sum(self) -> int:
        """Products with + and − between them."""
        value = self.product()
        while self.tokens and self.tokens[0] in {"+", "-"}:
            sign = 1 if self.tokens.pop(0) == "+" else -1
            value += sign * self.product()
        return value

    def product(self) -> int:
        """Factors with *, / and % between them; / cuts towards 0."""
        value = self.power()
        while self.tokens and self.tokens[0] in {"*", "/", "%"}:
            operator, other = self.tokens.pop(0), self.power()
            quotient = 0 if operator == "*" else abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
            value = {"*": value * other, "/": quotient, "%": value - quotient * other}[operator]
        return value

    def power(self) -> int:
        """A factor, or one to the power of another."""
        value = self.factor()
        if self.tokens and self.tokens[0] == "**":
            self.tokens.pop(0)
            exponent = self.power()
            if not 0 <= exponent <= MAX_EXPONENT:
                raise ValueError("exponent")
            return int(value**exponent)
        return value

    def factor(self) -> int:
        """A number, a variable, a sum in brackets, or one of them with a sign."""
        part = self.tokens.pop(0)
        if part in {"+", "-"}:
            return self.factor() if part == "+" else -self.factor()
        if part == "(":
            value = self.sum()
            if self.tokens.pop(0) != ")":
                raise ValueError("bracket")
            return value
        if part.isdigit():
            return int(part)
        found = self.variable(part)
        value_of = None if found is None else calculate(found, self.variable, self.depth + 1)
        if value_of is None:
            raise ValueError(part)
        return value_of
