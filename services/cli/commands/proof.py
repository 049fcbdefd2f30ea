"""Commands that prove the work of a job from its own folder: `millrace ledger`, `audit`, `replay`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import find_job_folder, open_client, read_job
from services.cli.views.terminal import open_console, print_json, print_result
from services.common.jobs.fates import Fate


def ledger(
    job: JobId,
    fate: Annotated[Fate | None, typer.Option(help="List the groups that ended so.")] = None,
    count: Annotated[int, typer.Option("-n", min=1, max=1000, help="Groups to list.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Groups to skip.")] = 0,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show what became of a job's groups: the sums, why groups failed, and with --fate which."""
    from services.cli.views.proof import print_ledger

    with open_client(home, url) as client:
        found = client.ledger(job, fate=fate, offset=offset, limit=count)
    print_result(found, partial(print_ledger, listed=fate is not None), as_json=as_json)


def audit(
    job: JobId,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    ended: Annotated[
        bool, typer.Option("--ended", help="Judge it as a job that has ended, whatever is said of its state.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="MILLRACE_JOURNAL_KEY_FILE", help="The key that the journal was sealed with: proves its records."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild every group's fate from the job's own files and check the accounts; ends with 1 on any violation."""
    from services.cli.views.proof import print_audit
    from services.learner.audit.files import audit_job
    from services.learner.storage.journal_key import JournalKey

    folder = find_job_folder(home, job)
    key = None if key_file is None else JournalKey.read(key_file)
    reported = read_job(home, url, folder.name)
    state = "succeeded" if ended else reported.state
    report = audit_job(folder, reported_steps=reported.steps, reported_state=state, key=key)
    report.remarks += reported.remarks
    if as_json:
        print_json(report.as_record())
    else:
        print_audit(open_console(), report)
    raise typer.Exit(1 if report.violations else 0)


def replay(
    job: JobId,
    first: Annotated[
        int,
        typer.Option(
            "--from", min=0, help="Policy version to begin with; 0: the initial weights. The steps after it are rerun."
        ),
    ],
    last: Annotated[int | None, typer.Option("--to", min=1, help="The last step; default: the journal's.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="What if: also rerun with this changed; may be repeated."),
    ] = None,
    home: Home = DEFAULT_HOME,
    *,
    as_json: AsJson = False,
) -> None:
    """Rerun recorded steps in ranks of its own and prove the weights equal, bit for bit; ends with 1 where they are not."""
    from services.cli.overrides import apply_changes
    from services.cli.views.proof import ReplayPrinter
    from services.common.config.settings import load_settings
    from services.learner.replay.plan import changed_spec, make_plan
    from services.learner.replay.run import replay as rerun

    folder = find_job_folder(home, job)
    settings = load_settings().model_copy(update={"home": home.resolve()})
    plan = make_plan(folder, settings, first, last)
    document = plan.spec.model_dump(mode="json")
    apply_changes(document, changes or [])
    changed, differences = changed_spec(plan.spec, document) if changes else (None, {})
    printer = ReplayPrinter(open_console(stderr=as_json), plan)
    report = rerun(plan, settings, changed, printer.progress)
    if as_json:
        print_json(report.as_record() | {"set": differences})
    else:
        printer.finish(report, differences)
    raise typer.Exit(0 if report.equal else 1)
