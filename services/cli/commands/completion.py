"""What the shell offers after TAB: the ids of this home's jobs, or nothing when the gateway is not quick to answer."""

from __future__ import annotations

from pathlib import Path

import typer

TIMEOUT_S = 0.8
"""A shell that hangs at TAB is worse than one that offers nothing."""


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Job ids that begin so, newest first, each with its state."""
    from services.cli.connect import open_client
    from services.common.errors import MillraceError

    home, url = context.params.get("home"), context.params.get("url")
    try:
        with open_client(Path(home or ".millrace"), url, timeout_s=TIMEOUT_S) as client:
            found = client.jobs()
    except MillraceError:
        return []
    return [(job["id"], job["state"]) for job in found if job["id"].startswith(incomplete)]
