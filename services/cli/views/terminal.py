"""Where the commands' words go: results on stdout, remarks on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """A console on stdout, or on stderr where stdout carries JSON."""
    from rich.console import Console

    return Console(highlight=False, stderr=stderr)


def print_json(value: object) -> None:
    """A result for programs."""
    import json

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """A remark for people."""
    typer.echo(text, err=True)
