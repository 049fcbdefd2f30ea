"""Terminal output of the commands: results on stdout, remarks on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def open_console(*, stderr: bool = False) -> Console:
    """A console on stdout, or on stderr where stdout carries JSON."""
    from rich.console import Console

    return Console(highlight=False, stderr=stderr)


def print_result(value: T, print_text: Callable[[Console, T], None], *, as_json: bool) -> None:
    """A result as JSON for programs, or as text for people."""
    if as_json:
        print_json(value)
    else:
        print_text(open_console(), value)


def print_json(value: object) -> None:
    """A result as JSON for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """A remark for people."""
    typer.echo(text, err=True)
