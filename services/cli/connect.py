"""Connection of a command to its gateway. Imports are made in the functions: `--help` and the shell's completion stay quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import ConfigError, MillraceError
from services.common.jobs.folder import SPEC_FILE

if TYPE_CHECKING:
    from millrace.gateway import GatewayClient
    from millrace.records import JsonObject

BRIEF_TIMEOUT_S = 5.0


@dataclass(slots=True)
class ReportedJob:
    """A job's state and step records as the gateway reports them; None where it was not reached."""

    state: str | None = None
    steps: list[JsonObject] | None = None
    remarks: list[str] = field(default_factory=list)


def open_client(home: Path, url: str | None, *, timeout_s: float | None = None) -> GatewayClient:
    """A client of the gateway at this URL, or of this home's. Raises ConfigError when nothing is up there, or the URL has no scheme."""
    from millrace.connection import find_gateway
    from millrace.gateway import TIMEOUT_S, GatewayClient

    address = find_gateway(url, home=home)
    return GatewayClient(address.url, address.token, timeout_s=TIMEOUT_S if timeout_s is None else timeout_s)


def find_job_folder(home: Path, job: str) -> Path:
    """The folder of the job with this id, or with the only id that begins so. Raises ConfigError where the home has none, or several."""
    found = _folders(home, job)
    if len(found) > 1:
        raise ConfigError(f"{job} begins the ids of several jobs: {', '.join(folder.name for folder in found)}")
    if not found:
        raise ConfigError(
            f"there is no job {job!r} in {home.resolve() / 'jobs'}: name the home where it ran with --home"
        )
    return found[0]


def complete_id(home: Path, job: str) -> str:
    """The only id in this home that begins so, else what is given: the job may have been deleted."""
    found = _folders(home, job)
    return found[0].name if len(found) == 1 else job


def _folders(home: Path, job: str) -> list[Path]:
    """Folders of jobs whose id begins so; only that of the id itself where there is one."""
    jobs = home.resolve() / "jobs"
    found = sorted(path.parent for path in jobs.glob(f"*/{SPEC_FILE}") if job and path.parent.name.startswith(job))
    return [folder for folder in found if folder.name == job] or found


def read_job(home: Path, url: str | None, job: str) -> ReportedJob:
    """The job's state and all its step records; a gateway that does not answer in a few seconds becomes a remark."""
    try:
        with open_client(home, url, timeout_s=BRIEF_TIMEOUT_S) as client:
            record, steps = client.job(job), client.all_steps(job)
    except MillraceError as error:
        return ReportedJob(remarks=[f"the gateway was not asked: {str(error).splitlines()[0]}"])
    return ReportedJob(str(record["state"]), steps)
