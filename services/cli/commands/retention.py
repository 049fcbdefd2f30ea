"""Commands that delete jobs: `millrace delete` and `millrace prune`."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, Url, complete_job
from services.cli.connect import open_client
from services.cli.views.terminal import open_console, print_json, say

JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of ended jobs.", autocompletion=complete_job)]


def delete(jobs: JobIds, home: Home = DEFAULT_HOME, url: Url = None) -> None:
    """Delete ended jobs with their folders: histories, journals, checkpoints, exported weights."""
    from millrace.gateway import GatewayError

    failed = False
    with open_client(home, url) as client:
        for job in jobs:
            try:
                client.delete(job)
            except GatewayError as error:
                if error.status is None:
                    raise
                say(f"millrace: {job}: {error}")
                failed = True
            else:
                typer.echo(f"{job} is deleted")
    raise typer.Exit(int(failed))


def prune(
    keep: Annotated[int | None, typer.Option("--keep", min=0, help="Keep so many ended jobs, the newest.")] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", min=0, help="Those that ended longer ago go.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="The oldest go until the others' folders take less: 200GiB."),
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete ended jobs beyond a limit. Jobs that have not ended, and those that they begin with, stay."""
    from services.cli.views.jobs import print_pruned

    size_limit = None if max_bytes is None else _parse_size(max_bytes)
    limits = {"keep": keep, "older_than_days": older_than, "max_bytes": size_limit}
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        raise typer.BadParameter("say what to keep: --keep, --older-than or --max-bytes")
    with open_client(home, url) as client:
        found = client.prune(given, dry_run=dry_run)
    if as_json:
        print_json(found)
        return
    print_pruned(open_console(), found["jobs"])
    done = "would be" if dry_run else "were"
    say(f"{len(found['jobs'])} jobs {done} deleted, {found['size_bytes'] / 2**20:,.1f} MiB")


def _parse_size(size: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise typer.BadParameter(f"--max-bytes: {size!r} is no size: write it as 500MB or 200GiB") from None
