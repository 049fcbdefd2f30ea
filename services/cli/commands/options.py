"""The options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.completion import complete_job

DEFAULT_HOME = Path(".millrace")

Home = Annotated[
    Path, typer.Option("--home", envvar="MILLRACE_HOME", help="Jobs, models, logs and `up.json` live below it.")
]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="MILLRACE_URL", help="A gateway other than this home's; its token is MILLRACE_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", autocompletion=complete_job)]
GatewayPort = Annotated[
    int,
    typer.Option(
        "--port", envvar="MILLRACE_GATEWAY_PORT", min=0, max=65535, help="The gateway's port; 0 takes a free one."
    ),
]
