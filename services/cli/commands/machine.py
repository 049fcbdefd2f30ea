"""Commands about the machine and its processes: `millrace workers`, `doctor`, `logs`."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from itertools import chain
from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import complete_id, open_client
from services.cli.views.terminal import open_console, print_json, print_result
from services.common.errors import ConfigError


class LogLevel(StrEnum):
    """Least level of the lines to show."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Service(StrEnum):
    """Service that wrote a line."""

    ENVIRONMENT = "environment"
    GATEWAY = "gateway"
    LEARNER = "learner"
    REWARD = "reward"
    ROLLOUT = "rollout"


def workers(home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """List the workers that are there and what they do."""
    from services.cli.views.jobs import print_workers

    with open_client(home, url) as client:
        found = client.workers()
    print_result(found, print_workers, as_json=as_json)


def doctor(
    home: Home = DEFAULT_HOME,
    url: Url = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port that `millrace up` would be given.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Check this machine and say what to do; ends with 1 when there is a problem."""
    from services.cli import doctor as doctor_

    if port is not None:
        os.environ["MILLRACE_GATEWAY_PORT"] = str(port)
    findings = doctor_.examine(home.resolve(), url)
    if as_json:
        print_json(doctor_.as_json(findings))
    else:
        doctor_.print_findings(open_console(), findings)
    raise typer.Exit(0 if doctor_.is_well(findings) else 1)


def logs(
    job: JobId,
    home: Home = DEFAULT_HOME,
    level: Annotated[LogLevel, typer.Option(help="Least level to show.")] = LogLevel.INFO,
    service: Annotated[
        Service | None, typer.Option(help="One service only; default: all, without the gateway's reads.")
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are, one JSON object each.")] = False,
) -> None:
    """Show what all services of this home logged about a job, by time."""
    from services.cli.logs import Filter, LogReader, format_line

    folder = home.resolve() / "logs"
    if not folder.is_dir():
        raise ConfigError(f"there are no logs in {folder}: name the home where `millrace up` runs with --home")
    reader = LogReader(folder, Filter(complete_id(home, job), level, service))
    lines = reader.read()
    if not lines and not follow:
        searched = f"{service or 'any service'}, {level} or worse"
        raise ConfigError(f"no line about {job} in {folder} ({searched}): `millrace jobs` lists the jobs there are")
    try:
        for line in chain(lines, reader.follow() if follow else ()):
            typer.echo(json.dumps(line, ensure_ascii=False) if as_json else format_line(line))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
