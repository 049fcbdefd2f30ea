"""Opens a client of the gateway that a command is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.cli.client import TIMEOUT_S, GatewayClient, JsonObject, find_token
from services.cli.stack.state import require_state
from services.common.errors import ConfigError, MillraceError


def open_client(home: Path, url: str | None, *, timeout_s: float = TIMEOUT_S) -> GatewayClient:
    """A client of the named gateway, or of this home's.

    Raises:
        ConfigError: the address has no scheme, or nothing is up in this home.
    """
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must begin with http:// or https://")
        return GatewayClient(url, find_token(None), timeout_s=timeout_s)
    state = require_state(home.resolve())
    return GatewayClient(state.url, find_token(state.token_file), timeout_s=timeout_s)


TIMEOUT_S = 5.0


@dataclass(slots=True)
class Told:
    """A job's state and step records as the gateway has them; None where it was not reached."""

    state: str | None = None
    steps: list[JsonObject] | None = None
    remarks: list[str] = field(default_factory=list)


def ask(home: Path, url: str | None, job: str) -> Told:
    """Asks the gateway, briefly; a gateway that is away is a remark."""
    try:
        with open_client(home, url, timeout_s=TIMEOUT_S) as client:
            record = client.job(job)
            steps: list[JsonObject] = []
            while page := client.steps(job, int(steps[-1]["step"]) + 1 if steps else 1):
                steps += page
    except MillraceError as error:
        return Told(remarks=[f"the gateway was not asked: {str(error).splitlines()[0]}"])
    return Told(str(record["state"]), steps)
