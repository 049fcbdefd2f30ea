"""Commands about single jobs and their list: from `millrace submit` to `millrace cancel`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import open_client
from services.cli.views.terminal import open_console, print_json, print_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from millrace.records import JsonObject, SampleFilters


def submit(
    file: Annotated[Path, typer.Argument(help="The job spec, YAML or JSON.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY.PATH=V1,V2,…", help="Submit a job for each value; several: for each combination."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show each step until the job ends; its state is the exit code.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Submit nothing: check all, show the first prompts and how their references are judged."
        ),
    ] = False,
    response: Annotated[
        str | None,
        typer.Option("--response", help="With --check: a response of your own to judge.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job, or a family of jobs."""
    from services.cli.overrides import load_job, swept
    from services.cli.views.follow import follow_job

    document, code = load_job(file, changes or []), 0
    if response is not None and not check:
        raise typer.BadParameter("is judged by a check: add --check", param_hint="--response")
    if check:
        if sweep or follow:
            raise typer.BadParameter("submits nothing; leave --sweep and --follow out", param_hint="--check")
        _check(document, response, home, url, as_json=as_json)
    if sweep:
        if follow:
            raise typer.BadParameter("follows one job, and a sweep is several", param_hint="--follow")
        documents = swept(document, sweep)
        with open_client(home, url) as client:
            records = [client.submit(each) for each in documents]
        print_result(records, _print_ids, as_json=as_json)
        return
    with open_client(home, url) as client:
        job = client.submit(document)
        if not as_json:
            typer.echo(job["id"])
        if follow:
            code, job = follow_job(client, job, open_console(stderr=as_json))
        if as_json:
            print_json(job)
    raise typer.Exit(code)


def _check(document: JsonObject, response: str | None, home: Path, url: str | None, *, as_json: bool) -> None:
    """Shows a dry run; the exit code is 1 where a reference is not judged right."""
    from services.cli.views.check import all_right, print_check

    with open_client(home, url) as client:
        found = client.check(document, response=response)
    print_result(found, print_check, as_json=as_json)
    raise typer.Exit(0 if all_right(found) else 1)


def resubmit(
    job: JobId,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Submit a job's spec again, with changes."""
    from services.cli.overrides import apply_changes

    with open_client(home, url) as client:
        document = client.job(job)["spec"]
        apply_changes(document, changes or [])
        record = client.submit(document)
    if as_json:
        print_json(record)
    else:
        typer.echo(record["id"])


def schema() -> None:
    """Print the JSON schema of the job spec, for editors and other programs."""
    from services.common.spec.job import spec_schema

    print_json(spec_schema())


def follow(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Show each step of a job until it ends; its state is the exit code."""
    from services.cli.views.follow import follow_job

    with open_client(home, url) as client:
        code, record = follow_job(client, client.job(job), open_console(stderr=as_json))
    if as_json:
        print_json(record)
    raise typer.Exit(code)


def label(
    job: JobId,
    add: Annotated[list[str] | None, typer.Option("--add", metavar="TAG", help="Add a tag; may be repeated.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="Remove a tag; may be repeated.")
    ] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Set the notes.", show_default=False)] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Change a job's tags and notes."""
    from millrace.job import Job

    with open_client(home, url) as client:
        record = Job(client, client.job(job)).label(add or (), remove or (), notes).record
    if as_json:
        print_json(record)
    else:
        typer.echo(
            f"{record['id']}: {', '.join(record['tags']) or 'no tags'}{'; ' if record['notes'] else ''}{record['notes']}"
        )


def _print_ids(_: Console, records: Sequence[JsonObject]) -> None:
    for record in records:
        typer.echo(record["id"])


def jobs(
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Only jobs with this tag; may be repeated.")
    ] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only jobs in this state.", show_default=False)] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Only jobs with this in their id.", show_default=False)
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            "--search", help="Only jobs with these words in id, tags, notes, model or data.", show_default=False
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", help="name, state, model, data, step, reward, best_score or run_time.", show_default=False
        ),
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    ascending: Annotated[bool, typer.Option("--ascending", help="From the least on.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first or in another order, with the last reward and the best held-out score."""
    from services.cli.views.jobs import print_jobs

    filters = {
        "tag": tags, "state": state, "name": name, "search": search, "sort": sort, "ascending": "true" if ascending else None,
    }  # fmt: skip
    with open_client(home, url) as client:
        found = client.jobs(wanted={key: value for key, value in filters.items() if value})
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
    purpose: Annotated[str | None, typer.Option(help="Groups of train or of eval only.", show_default=False)] = None,
    group: Annotated[int | None, typer.Option(min=0, help="This group only.", show_default=False)] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Groups sampled by this step's policy only.", show_default=False)
    ] = None,
    grep: Annotated[
        str | None, typer.Option(help="Rollouts with this text only, in any case.", show_default=False)
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    wrong: Annotated[bool, typer.Option("--wrong", help="Rollouts judged less than right only.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Rollouts whose check failed only.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Rollouts that the length limit cut only.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts and completions as the model sees them, special tokens included.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a job's newest rollouts: prompts, texts and how they were judged."""
    from services.cli.views.jobs import print_rollouts

    filters: SampleFilters = {
        "purpose": purpose,
        "group": group,
        "grep": grep,
        "wrong": wrong,
        "failed": failed,
        "truncated": truncated,
        "step": step,
        "raw": raw,
    }
    with open_client(home, url) as client:
        groups = client.rollouts(job, count, **filters)
    print_result(groups, print_rollouts, as_json=as_json)


def cancel(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Cancel a job."""
    with open_client(home, url) as client:
        record = client.cancel(job)
    _print_change(record, "its learner was asked to stop", done=record["state"] == "cancelled", as_json=as_json)


def pause(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Pause a job: the step under way is finished and saved, servers stay attached; a queued job is held back."""
    with open_client(home, url) as client:
        record = client.pause(job)
    paused = record["state"] == "paused"
    _print_change(record, "it pauses when the step under way is done", done=paused, as_json=as_json)


def resume(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Resume a paused job where it stands."""
    with open_client(home, url) as client:
        record = client.resume(job)
    _print_change(record, "its learner was asked to go on", done=record["state"] != "paused", as_json=as_json)


def _print_change(record: JsonObject, pending: str, *, done: bool, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        typer.echo(f"{record['id']} is {record['state']}{'' if done else f': {pending}'}")
