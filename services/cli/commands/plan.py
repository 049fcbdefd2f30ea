"""Command that forecasts a job's speed: `millrace plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import open_client
from services.cli.views.terminal import open_console, print_json
from services.common.errors import ConfigError


def plan(
    job: JobId,
    servers: Annotated[
        list[int] | None,
        typer.Option(
            "--servers", min=1, max=4096, help="Rollout servers to plan for; may be repeated (default: 1, 2, 4 …)."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Plan with this changed; may be repeated."),
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Forecast a job's speed with other numbers of rollout servers, and colocated, from the rates of the steps it has run."""
    from services.cli.overrides import apply_changes
    from services.cli.views.plan import print_plan
    from services.common.capacity.plan import make_plan, planned_spec
    from services.common.capacity.rates import MAX_STEPS, WARM_UP_STEPS, measure
    from services.common.jobs.step_record import StepRecord
    from services.common.spec.base import RECORDED
    from services.common.spec.job import JobSpec

    with open_client(home, url) as client:
        record = client.job(job)
        steps = client.steps(job, max(1, int(record["step"]) - WARM_UP_STEPS - MAX_STEPS))
    measured = JobSpec.model_validate(record["spec"], context=RECORDED)
    document = measured.model_dump(mode="json")
    apply_changes(document, changes or [])
    planned = planned_spec(measured, document)
    try:
        rates = measure([StepRecord.model_validate(step) for step in steps])
    except ConfigError as error:
        raise ConfigError(f"job {job}: {error}") from error
    found = make_plan(rates, measured, planned, servers or ())
    if as_json:
        print_json(found.as_record())
    else:
        print_plan(open_console(), found)
