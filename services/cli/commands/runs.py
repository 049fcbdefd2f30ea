"""Commands about what jobs have measured: `millrace metrics`, `compare`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url, complete_job
from services.cli.connect import open_client
from services.cli.views.terminal import print_result
from services.common.errors import ConfigError


class TableFormat(StrEnum):
    """Form of a table for other programs."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


def metrics(
    job: JobId,
    form: Annotated[TableFormat, typer.Option("--format", help="Form of the table.")] = TableFormat.CSV,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write here instead of to stdout.", show_default=False)
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    evals: Annotated[bool, typer.Option("--evals", help="The held-out evaluations instead of the steps.")] = False,
) -> None:
    """Print a job's step records as a table: a row for each step, a column for each figure."""
    from services.cli.views.tables import table_bytes

    if form is TableFormat.PARQUET and out is None and sys.stdout.isatty():
        raise ConfigError("parquet is no text: name a file with --out, or redirect the output")
    with open_client(home, url) as client:
        rows = client.evals(job) if evals else client.all_steps(job)
    data = table_bytes(rows, form)
    if out is None:
        sys.stdout.buffer.write(data)
        return
    try:
        out.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error


def compare(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs.", autocompletion=complete_job)],
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show jobs side by side: how far and how good each is, and the settings in which they differ."""
    from services.cli.views.compare import print_comparison

    with open_client(home, url) as client:
        found = client.compare(jobs)
    print_result(found, print_comparison, as_json=as_json)
