"""Deaths of ranks: the launcher's record of each, and the agent's one-line cause.

torchelastic ── "failed (exitcode: …)" + the rank's error ──► <beats>/deaths ──► agent + out of memory? ──► cause
"""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import dataclass
from pathlib import Path

DEATHS = "deaths"
"""File beside the ranks' heartbeats: [local rank, exit code, error] as JSON, one line for each failure of the ranks."""
TORCH_LOG = "torch.distributed.elastic.multiprocessing.api"
CAUSE_CHARS = 500
_VMSTAT = Path("/proc/vmstat")


class DeathsHandler(logging.Handler):
    """Records the rank that failed first from torchelastic's log: its exit code is not available elsewhere before the last restart."""

    def __init__(self, folder: Path, error_file: Path) -> None:
        """`error_file`: of a rank's exception, which is taken before the ranks that are started next may write theirs."""
        super().__init__(logging.ERROR)
        self._path, self._error_file = folder / DEATHS, error_file

    def emit(self, record: logging.LogRecord) -> None:
        """Writes rank and exit code from the arguments of torchelastic's message; ignores other messages."""
        if "exitcode" not in str(record.msg) or not isinstance(record.args, tuple) or len(record.args) < 2:
            return
        code, rank = record.args[:2]
        if isinstance(code, int) and isinstance(rank, int):
            line = json.dumps([rank, code, _take_error(self._error_file)])
            with self._path.open("a") as file:
                file.write(line + "\n")


@dataclass(frozen=True, slots=True)
class RankDeath:
    """Cause of one failure of the ranks."""

    cause: str
    """One line of text."""
    killed: bool
    """By SIGKILL, and not for lack of memory: perhaps from outside."""


class RankDeaths:
    """Deaths of this machine's ranks in one launch."""

    def __init__(self, folder: Path, first_rank: int = 0) -> None:
        """`first_rank`: this machine's first among all."""
        self._path, self._first_rank = folder / DEATHS, first_rank
        self._read = 0
        self._oom = oom_kills()

    def check(self) -> list[RankDeath]:
        """The deaths since the last call; torchelastic restarts all ranks after each."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        found, self._read = lines[self._read :], len(lines)
        return [self._death(*json.loads(line)) for line in found]

    def _death(self, rank: int, code: int, error: str) -> RankDeath:
        parts = [error] if error and code >= 0 else [ended(rank + self._first_rank, code), error]
        now, before = oom_kills(), self._oom
        self._oom = now
        parts += ["the machine ran out of memory: the kernel killed a process"] if now > before else []
        cause = "; ".join(filter(None, parts))[:CAUSE_CHARS]
        return RankDeath(cause, killed=code == -signal.SIGKILL and now == before)


def ended(rank: int, code: int) -> str:
    """How a rank ended, as text; `code`: its exit code, or minus the signal that killed it."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} was killed by {name}"


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory since boot; 0 where it is not known."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _take_error(path: Path) -> str:
    """A rank's error on one line; its file is removed."""
    try:
        error = " ".join(path.read_text(errors="replace").split())
        path.unlink()
    except FileNotFoundError:
        return ""
    return error[:CAUSE_CHARS]
