"""Commands about jobs: `millrace submit`, `jobs`, `show`, `rollouts`, `cancel`, `pause`, `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import open_client
from services.cli.views.terminal import open_console, print_json, print_result

if TYPE_CHECKING:
    from services.cli.client import JsonObject


def submit(
    file: Annotated[Path, typer.Argument(help="The job spec, YAML or JSON.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show each step until the job ends; its state is the exit code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job."""
    from services.cli.overrides import load_job
    from services.cli.views.follow import follow_job

    document, code = load_job(file, changes or []), 0
    with open_client(home, url) as client:
        job = client.submit(document)
        if not as_json:
            typer.echo(job["id"])
        if follow:
            code, job = follow_job(client, job, open_console(stderr=as_json))
        if as_json:
            print_json(job)
    raise typer.Exit(code)


def jobs(home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """List jobs, newest first."""
    from services.cli.views.jobs import print_jobs

    with open_client(home, url) as client:
        found = client.jobs()
    print_result(found, print_jobs, as_json=as_json)


def show(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Show one job: state, progress, evaluations."""
    from services.cli.views.jobs import print_job

    with open_client(home, url) as client:
        record = client.job(job)
        history = client.history(job, max(1, int(record["step"])))
    if as_json:
        print_json(record | {"evals": history["evals"]})
    else:
        print_job(open_console(), record, history["evals"], history["steps"][-1] if history["steps"] else None)


def rollouts(
    job: JobId,
    count: Annotated[int, typer.Option("-n", min=1, max=500, help="Groups to show.")] = 3,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a job's newest rollouts: prompts, texts and rewards."""
    from services.cli.views.jobs import print_rollouts

    with open_client(home, url) as client:
        groups = client.rollouts(job, count)
    print_result(groups, print_rollouts, as_json=as_json)


def cancel(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Cancel a job."""
    with open_client(home, url) as client:
        record = client.cancel(job)
    _print_change(job, record, "its learner was asked to stop", done=record["state"] == "cancelled", as_json=as_json)


def pause(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Pause a job: the step under way is finished and saved, servers stay attached; a queued job is held back."""
    with open_client(home, url) as client:
        record = client.pause(job)
    paused = record["state"] == "paused"
    _print_change(job, record, "it pauses when the step under way is done", done=paused, as_json=as_json)


def resume(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Resume a paused job where it stands."""
    with open_client(home, url) as client:
        record = client.resume(job)
    _print_change(job, record, "its learner was asked to go on", done=record["state"] != "paused", as_json=as_json)


def _print_change(job: str, record: JsonObject, pending: str, *, done: bool, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        typer.echo(f"{job} is {record['state']}{'' if done else f': {pending}'}")
