"""Commands `millrace dead-letters`: entries of a job's streams that could not be used."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import open_client
from services.cli.views.terminal import print_json, print_result
from services.common.redis.keys import Stage

app = typer.Typer(
    help="Entries of a job's streams that could not be used: list them, look at one, put one back.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StageName = Annotated[Stage, typer.Argument(metavar="STAGE", help="tasks, rollouts or scored.")]
EntryId = Annotated[str, typer.Argument(metavar="ENTRY", help="The letter, as `list` names it.")]


@app.command("list")
def list_letters(
    job: JobId,
    stage: Annotated[Stage | None, typer.Option("--stage", help="Of this stage only.")] = None,
    count: Annotated[int, typer.Option("-n", min=1, max=1000, help="Most letters of a stage.")] = 100,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List a job's dead letters, newest first."""
    from services.cli.views.jobs import print_letters

    with open_client(home, url) as client:
        found = client.dead_letters(job, stage, count)
    print_result(found, lambda console, answer: print_letters(console, answer["letters"]), as_json=as_json)


@app.command()
def show(
    job: JobId, stage: StageName, entry: EntryId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False
) -> None:
    """Show one dead letter: why, when, and what it says."""
    from services.cli.views.jobs import print_letter

    with open_client(home, url) as client:
        letter = client.dead_letter(job, stage, entry)
    print_result(letter, print_letter, as_json=as_json)


@app.command()
def requeue(
    job: JobId, stage: StageName, entry: EntryId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False
) -> None:
    """Put a dead letter back on its stream, as if it were new."""
    with open_client(home, url) as client:
        done = client.requeue(job, stage, entry)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{entry} ({done['member']}) is back on the {stage} stream of {job}")
