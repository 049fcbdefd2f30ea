"""Options and arguments that several commands share, and the shell's completion of job ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.connect import open_client
from services.common.errors import MillraceError

DEFAULT_HOME = Path(".millrace")
COMPLETION_TIMEOUT_S = 0.8
"""Short, because the shell waits for it after TAB; without an answer in time it offers nothing."""


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of this home's jobs with this prefix, newest first, each with its state."""
    home, url = context.params.get("home"), context.params.get("url")
    try:
        with open_client(Path(home or DEFAULT_HOME), url, timeout_s=COMPLETION_TIMEOUT_S) as client:
            found = client.jobs()
    except MillraceError:
        return []
    return [(job["id"], job["state"]) for job in found if job["id"].startswith(incomplete)]


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
