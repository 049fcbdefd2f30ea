"""Deaths of ranks: what their launcher writes down of each, and the agent's one line about it.

torchelastic ── "failed (exitcode: …)" ──► <beats>/deaths ──► agent + what the rank said + out of memory? ──► cause
"""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import dataclass
from pathlib import Path

DEATHS = "deaths"
"""File beside the ranks' heartbeats: [local rank, exit code] as JSON, a line for each time that the ranks failed."""
TORCH_LOG = "torch.distributed.elastic.multiprocessing.api"
CAUSE_CHARS = 500
_VMSTAT = Path("/proc/vmstat")


class DeathsHandler(logging.Handler):
    """Writes down what torchelastic logs of the rank that failed first: nobody else learns its exit code before the last restart."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the heartbeats."""
        super().__init__(logging.ERROR)
        self._path = folder / DEATHS

    def emit(self, record: logging.LogRecord) -> None:
        """Takes the message's arguments; a message that is none of these is left alone."""
        if "exitcode" not in str(record.msg) or not isinstance(record.args, tuple) or len(record.args) < 2:
            return
        code, rank = record.args[:2]
        if isinstance(code, int) and isinstance(rank, int):
            with self._path.open("a") as file:
                file.write(json.dumps([rank, code]) + "\n")


@dataclass(frozen=True, slots=True)
class RankDeath:
    """Why the ranks failed once."""

    cause: str
    """One line for people."""
    killed: bool
    """By SIGKILL, and not for want of memory: somebody else's doing, perhaps."""


class RankDeaths:
    """The deaths of this machine's ranks in one launch."""

    def __init__(self, folder: Path, error_file: Path, first_rank: int = 0) -> None:
        """`error_file`: where a rank leaves what it raised; `first_rank`: this machine's first among all."""
        self._path = folder / DEATHS
        self._error_file = error_file
        self._first_rank = first_rank
        self._read = 0
        self._oom = oom_kills()

    def look(self) -> list[RankDeath]:
        """The deaths since the last look; torchelastic restarts all ranks after each. Of several at once, all have the newest words."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        found, self._read = lines[self._read :], len(lines)
        said = _take(self._error_file) if found else ""
        return [self._death(rank, code, said) for rank, code in map(json.loads, found)]

    def _death(self, rank: int, code: int, said: str) -> RankDeath:
        parts = [said] if said and code >= 0 else [ended(rank + self._first_rank, code), said]
        now, before = oom_kills(), self._oom
        self._oom = now
        parts += ["the machine ran out of memory: the kernel killed a process"] if now > before else []
        cause = "; ".join(filter(None, parts))[:CAUSE_CHARS]
        return RankDeath(cause, killed=code == -signal.SIGKILL and now == before)


def ended(rank: int, code: int) -> str:
    """How a rank ended, for people; `code`: minus the signal that killed it, or its exit code."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} was killed by {name}"


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _take(path: Path) -> str:
    """What a rank left there, on one line; the next one finds it empty."""
    try:
        said = " ".join(path.read_text(errors="replace").split())
        path.unlink()
    except FileNotFoundError:
        return ""
    return said[:CAUSE_CHARS]
