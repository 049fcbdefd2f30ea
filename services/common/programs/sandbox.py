"""Sandbox of programs, the caller's side: starts a runner, and reads what became of each run. For a process that may itself be killed.

run ──► runner (fresh interpreter, isolated) ── fork ──► the program, once for each run      killed at the deadline, with all below it
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config.settings import Programs
from services.common.errors import ProgramError
from services.common.programs.isolation import NOBODY

log = logging.getLogger(__name__)

CODE_REWARD = "MILLRACE_CODE_REWARD"
"""Environment variable of verifier processes: the operator's choice, a `Programs`."""
CODE_ENVIRONMENT = "MILLRACE_CODE_ENVIRONMENT"
"""The same of the processes of episodes."""

END_S = 2.0
"""For the end of the runner, beyond the programs' time."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = {"", "py", "python", "python3"}

_ROOT = str(Path(__file__).parents[3])
_COMMAND = [sys.executable, "-S", "-P", "-B", "-m", "services.common.programs.runner"]
"""Without the packages of this environment, and without the current directory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program. Example: Limits(seconds=8.0, run_seconds=2.0, memory_mib=512)."""

    seconds: float
    """Of all runs together, and of the start of the runner."""
    run_seconds: float
    memory_mib: int
    """Address space of one run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run."""

    end: str
    """`ended` by itself, or was ended: `late`, or it `talks` too much."""
    status: int
    """Wait status of its process, as of `os.waitpid`."""
    stdout: str
    note: dict[str, Any]
    """What the program's process reports: `value` of a call, `passed` with the mark of a check, `error`. Not to be trusted."""

    @property
    def fault(self) -> str:
        """Why the run did not end well, for people; empty when it did."""
        if self.end != "ended":
            return {"late": "out of time"}.get(self.end, "too much output")
        if os.WIFSIGNALED(self.status):
            return f"ended by signal {os.WTERMSIG(self.status)}"
        return str(self.note.get("error") or "") or (f"exit status {self.status >> 8}" if self.status else "")


def run(program: str, runs: Sequence[dict[str, Any]], limits: Limits, *, setting: str) -> list[Outcome]:
    """What became of each run of a program (the forms of runs: `runner`), in their order. `setting`: the variable that allows it.

    Raises ProgramError when the operator does not let programs run, the kernel does not isolate them, or the runner fails.
    """
    allowed = os.environ.get(setting)
    if allowed not in {Programs.ISOLATED, Programs.ANYWHERE}:
        raise ProgramError(f"programs do not run here: {setting} is not set")
    replies = _ask(program, runs, limits, isolated=True)
    if "refused" in replies[0] and allowed == Programs.ANYWHERE:
        replies = _ask(program, runs, limits, isolated=False)
    if "refused" in replies[0]:
        raise ProgramError(f"programs do not run here: {not_isolated(replies[0]['refused'], setting)}")
    if len(replies) != len(runs) + 1:
        raise ProgramError(f"the runner answered for {len(replies) - 1} of {len(runs)} runs")
    return [_outcome(reply) for reply in replies[1:]]


def not_isolated(fault: str, setting: str) -> str:
    """That the kernel refuses to isolate programs, and what does without, for people. `setting`: the variable that allows them."""
    return f"the kernel does not isolate them ({fault}); {setting}={Programs.ANYWHERE} does without"


def isolation_fault() -> str:
    """Why the kernel does not isolate programs here; empty when it does. Takes the start of a runner, END_S at most.

    Raises ProgramError when no runner can be started.
    """
    limits = Limits(seconds=END_S, run_seconds=END_S, memory_mib=256)
    return str(_ask("pass", [{"stdin": ""}], limits, isolated=True)[0].get("refused", ""))


def last_block(response: str) -> str | None:
    """The last closed code block in Python, or without a language; None where there is none."""
    blocks = [text for language, text in _BLOCK.findall(response) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


async def log_isolation(allowed: Programs) -> None:
    """Logs whether programs that a model writes run here, and isolated; nothing where the operator does not let them."""
    if allowed is Programs.OFF:
        return
    try:
        fault = await asyncio.to_thread(isolation_fault)
    except ProgramError as error:
        fault = str(error)
    if fault:
        how = "do not run" if allowed is Programs.ISOLATED else "run, though"
        log.warning("programs that a model writes %s: the kernel does not isolate them (%s)", how, fault)
    else:
        log.info("programs that a model writes run isolated")


def _ask(program: str, runs: Sequence[dict[str, Any]], limits: Limits, *, isolated: bool) -> list[dict[str, Any]]:
    """The runner's replies, the first about itself."""
    folder = tempfile.mkdtemp(prefix="millrace-program-")
    request = {
        "program": program, "runs": list(runs), "until": time.monotonic() + limits.seconds, "run_seconds": limits.run_seconds,
        "memory_mib": limits.memory_mib, "folder": folder, "isolated": isolated,
    }  # fmt: skip
    environment = {"PYTHONPATH": _ROOT, "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    try:
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        done = subprocess.run(
            _COMMAND, input=json.dumps(request).encode(), capture_output=True, cwd=folder,
            env=environment, timeout=limits.seconds + END_S, check=False,
        )  # fmt: skip
        replies = [json.loads(line) for line in done.stdout.splitlines()]
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"the runner took longer than {limits.seconds + END_S:g} s") from error
    except (OSError, ValueError) as error:
        raise ProgramError(f"the runner of programs does not work: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not replies:
        raise ProgramError(
            f"the runner of programs does not start: {done.stderr[-300:].decode(errors='replace').strip()}"
        )
    return replies


def _outcome(reply: dict[str, Any]) -> Outcome:
    try:
        note = json.loads(reply["note"] or "{}")
    except (ValueError, RecursionError):
        note = {}
    return Outcome(reply["end"], reply["status"], reply["stdout"], note if isinstance(note, dict) else {})
