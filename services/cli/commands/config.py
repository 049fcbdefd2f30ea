"""Command that turns other trainers' configurations into job specs: `millrace config import`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.common.errors import ConfigError

if TYPE_CHECKING:
    from services.cli.imports.convert import Request, SourceName

app = typer.Typer(
    help="Configurations of other trainers: turn one into a job spec.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def about() -> None:
    """Configurations of other trainers: turn one into a job spec."""


@app.command("import")
def import_config(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.yaml] [OVERRIDE]...", help="The configuration, and Hydra's key=value, +key=value, ~key."
        ),
    ] = None,
    script: Annotated[
        Path | None, typer.Option("--script", help="A shell script that calls verl's trainer; it is read and not run.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="SOURCE", help="verl or mindspeed-rl (default: by the sections).")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows of the training data: verl's epochs become steps.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a field of the spec; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the spec here instead of stdout.")] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Write the report here instead of stderr.")
    ] = None,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a key is unknown.")] = False,
) -> None:
    """Turn a configuration of MindSpeed-RL or verl into a job spec, with a line for each key: what it became, or why not."""
    from services.cli.imports.convert import convert
    from services.cli.imports.result import Outcome, report, summary

    found = convert(_request(arguments or [], script, source, rows, changes or []), os.environ)
    _write(out, found.text, err=False)
    _write(report_file, report(found), err=True)
    if report_file is not None:
        typer.echo(summary(found), err=True)
    if found.problems:
        raise ConfigError(*found.problems)
    raise typer.Exit(1 if strict and found.of(Outcome.UNKNOWN) else 0)


def _request(
    arguments: list[str], script: Path | None, source: str | None, rows: int | None, changes: list[str]
) -> Request:
    from services.cli.imports.convert import Request
    from services.cli.imports.inputs.hydra import is_override

    files = [text for text in arguments if not is_override(text)]
    if len(files) > 1:
        raise ConfigError(f"one file can be imported, not {', '.join(files)}; an override looks like key=value")
    if files and script:
        raise ConfigError(f"give {files[0]} or --script {script}, not both")
    overrides = tuple(text for text in arguments if is_override(text))
    file = Path(files[0]) if files else None
    return Request(file, script, overrides, _source_name(source), rows, tuple(changes))


def _source_name(source: str | None) -> SourceName | None:
    from services.cli.imports.convert import SourceName

    if source is None:
        return None
    if source not in set(SourceName):
        raise ConfigError(f"--from {source}: there are {', '.join(SourceName)}")
    return SourceName(source)


def _write(path: Path | None, text: str, *, err: bool) -> None:
    if path is None:
        typer.echo(text, err=err, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
