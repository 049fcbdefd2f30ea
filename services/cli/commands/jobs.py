"""The commands about jobs: `millrace submit`, `jobs`, `show`, `rollouts`, `cancel`, `pause`, `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.views.terminal import open_console, print_json


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
    from services.cli.connect import open_client
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
    from services.cli.connect import open_client
    from services.cli.views.jobs import print_jobs

    with open_client(home, url) as client:
        found = client.jobs()
    if as_json:
        print_json(found)
    else:
        print_jobs(open_console(), found)


def show(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Show one job: state, progress, evaluations."""
    from services.cli.connect import open_client
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
    from services.cli.connect import open_client
    from services.cli.views.jobs import print_rollouts

    with open_client(home, url) as client:
        groups = client.rollouts(job, count)
    if as_json:
        print_json(groups)
    else:
        print_rollouts(open_console(), groups)


def cancel(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Cancel a job."""
    from services.cli.connect import open_client

    with open_client(home, url) as client:
        record = client.cancel(job)
    if as_json:
        print_json(record)
        return
    asked = record["state"] != "cancelled"
    typer.echo(f"{job} is {record['state']}{': its learner was asked to stop' if asked else ''}")


def pause(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Pause a job: the step under way is finished and saved, servers stay attached; a queued job is held back."""
    from services.cli.connect import open_client

    with open_client(home, url) as client:
        record = client.pause(job)
    if as_json:
        print_json(record)
        return
    paused = record["state"] == "paused"
    typer.echo(f"{job} is {record['state']}{'' if paused else ': it pauses when the step under way is done'}")


def resume(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Resume a paused job where it stands."""
    from services.cli.connect import open_client

    with open_client(home, url) as client:
        record = client.resume(job)
    if as_json:
        print_json(record)
        return
    goes_on = record["state"] != "paused"
    typer.echo(f"{job} is {record['state']}{'' if goes_on else ': its learner was asked to go on'}")
