"""What the gateway tells of a job, where one can be reached: nothing that is offline needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.cli.client import JsonObject
from services.cli.connect import open_client
from services.common.errors import MillraceError

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
