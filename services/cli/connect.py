"""Connection of a command to its gateway. Imports are made in the functions: `--help` and the shell's completion stay quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from services.cli.client import GatewayClient, JsonObject

BRIEF_TIMEOUT_S = 5.0


@dataclass(slots=True)
class ReportedJob:
    """A job's state and step records as the gateway reports them; None where it was not reached."""

    state: str | None = None
    steps: list[JsonObject] | None = None
    remarks: list[str] = field(default_factory=list)


def open_client(home: Path, url: str | None, *, timeout_s: float | None = None) -> GatewayClient:
    """A client of the gateway at this URL, or of this home's. Raises ConfigError when nothing is up there, or the URL has no scheme."""
    from services.cli.client import TIMEOUT_S, GatewayClient, find_token
    from services.cli.stack.state import require_state

    token_file = None
    if url is None:
        state = require_state(home.resolve())
        url, token_file = state.url, state.token_file
    elif not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: must begin with http:// or https://")
    return GatewayClient(url, find_token(token_file), timeout_s=TIMEOUT_S if timeout_s is None else timeout_s)


def read_job(home: Path, url: str | None, job: str) -> ReportedJob:
    """The job's state and all its step records; a gateway that does not answer in a few seconds becomes a remark."""
    try:
        with open_client(home, url, timeout_s=BRIEF_TIMEOUT_S) as client:
            record = client.job(job)
            steps: list[JsonObject] = []
            while page := client.steps(job, int(steps[-1]["step"]) + 1 if steps else 1):
                steps += page
    except MillraceError as error:
        return ReportedJob(remarks=[f"the gateway was not asked: {str(error).splitlines()[0]}"])
    return ReportedJob(str(record["state"]), steps)
