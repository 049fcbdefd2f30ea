"""Runner of programs: a fresh interpreter that isolates itself, then forks a process for each run. Imports the standard library alone.

    stdin    one JSON object: {"program", "runs": [run, …], "until", "run_seconds", "memory_mib", "folder", "isolated"}, with "until" by the
             monotonic clock; a run: {"stdin": text}  {"call": name, "arguments": [...]}  {"check": code, "mark": text}
    stdout   {"ready": true} or {"refused": reason}, then a JSON object for each run:
             {"end": "ended" | "late" | "talks", "status": wait status, "stdout": text, "note": what the process reports}

What is right is never known here: outputs are compared by the parent. In a namespace of its own the process that forks is number 1: the
processes that a run leaves behind are killed with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from services.common.programs.isolation import drop_rights, isolate, leave_root, limit

MAX_OUTPUT_BYTES = 1024 * 1024
"""Of one run's standard output, and of what it reports."""
MAX_TOTAL_BYTES = 16 * 1024 * 1024
"""The same of all runs together."""
_POLL_S = 0.005


def main() -> None:
    """Serves one request."""
    request = json.load(sys.stdin)
    with open(os.dup(1), "w", encoding="utf-8") as replies:  # noqa: PTH123  a descriptor
        try:
            os.chdir(request["folder"])
            own = bool(request["isolated"])
            _enter(request["folder"], own=own)
            os.listdir(os.path.dirname(os.__file__))  # noqa: PTH120, PTH208  it must be able to import
        except OSError as error:
            _reply(replies, {"refused": f"{error.filename}: {error.strerror}" if error.filename else error.strerror})
            return
        _reply(replies, {"ready": True})
        for outcome in _outcomes(request, own=own):
            _reply(replies, outcome)


def _enter(folder: str, *, own: bool) -> None:
    """Isolates this process; the original one stays behind, and waits for its end."""
    if not own:
        leave_root()
        drop_rights()
        return
    isolate(folder)
    child = os.fork()
    if child:
        os.close(1)
        os.waitpid(child, 0)
        os._exit(0)
    drop_rights()


def _outcomes(request: dict[str, Any], *, own: bool) -> Iterator[dict[str, Any]]:
    until, room = request["until"], MAX_TOTAL_BYTES
    for run in request["runs"]:
        seconds = min(request["run_seconds"], until - time.monotonic())
        if seconds <= 0 or room <= 0:
            yield {"end": "late" if seconds <= 0 else "talks", "status": 0, "stdout": "", "note": ""}
            continue
        outcome = _run(request["program"], run, seconds, request["memory_mib"], own=own)
        room -= len(outcome["stdout"]) + len(outcome["note"])
        yield outcome


def _run(program: str, run: dict[str, Any], seconds: float, memory_mib: int, *, own: bool) -> dict[str, Any]:
    given = os.memfd_create("stdin")
    os.write(given, run.get("stdin", "").encode("utf-8", "replace"))
    os.lseek(given, 0, os.SEEK_SET)
    (said, says), (noted, notes) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(given, says, notes)
        _execute(program, run, seconds, memory_mib, own=own)
    for descriptor in (given, says, notes):
        os.close(descriptor)
    try:
        end, texts = _follow(pid, [said, noted], time.monotonic() + seconds)
    finally:
        for descriptor in (said, noted):
            os.close(descriptor)
    status = _end_all(pid, own=own)
    return {"end": end, "status": status, "stdout": texts[said], "note": texts[noted]}


def _follow(pid: int, descriptors: list[int], until: float) -> tuple[str, dict[int, str]]:
    """How the run ended, and what it wrote; it may still be alive."""
    written = {descriptor: bytearray() for descriptor in descriptors}
    reading, end = list(descriptors), "ended"
    while reading and end == "ended":
        ready = select.select(reading, [], [], max(0.0, until - time.monotonic()))[0]
        for descriptor in ready:
            data = os.read(descriptor, 1 << 16)
            written[descriptor] += data
            if not data:
                reading.remove(descriptor)
        if not ready:
            end = "late"
        elif any(len(each) > MAX_OUTPUT_BYTES for each in written.values()):
            end = "talks"
    while end == "ended" and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            end = "late"
        time.sleep(_POLL_S)
    texts = {
        descriptor: bytes(each[:MAX_OUTPUT_BYTES]).decode("utf-8", "replace") for descriptor, each in written.items()
    }
    return end, texts


def _end_all(pid: int, *, own: bool) -> int:
    """Kills what the run has left, and returns the wait status of its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL) if own else os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(ChildProcessError):
        while own:
            os.waitpid(-1, 0)
    return status


def _become(given: int, says: int, notes: int) -> None:
    """Gives this process the run's files alone: 0 and 1, 2 to nowhere, 3 for what it reports."""
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, 8) for each in (given, says, nowhere, notes)]
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    os.closerange(4, 4096)


def _execute(program: str, run: dict[str, Any], seconds: float, memory_mib: int, *, own: bool) -> None:
    """Runs the program, and what the run wants of it; does not return."""
    note: dict[str, Any] = {}
    try:
        limit(seconds, memory_mib, alone=own)
        os.environ.clear()
        sys.argv, sys.path[:] = ["program.py"], [path for path in sys.path if Path(path).is_dir()]
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode, encoding="utf-8") for number, mode in enumerate("rww"))  # noqa: PTH123, SIM115
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        exec(compile(program, "program.py", "exec"), main_module.__dict__)  # noqa: S102  what this process is for
        if "call" in run:
            note["value"] = _function(main_module, run["call"])(*run["arguments"])
        if "check" in run:
            exec(compile(run["check"], "check.py", "exec"), main_module.__dict__)  # noqa: S102
            note["passed"] = run["mark"]
    except SystemExit as error:
        if error.code not in (None, 0):
            note = {"error": f"SystemExit: {error.code}"[:300]}
    except BaseException as error:  # noqa: BLE001  of a program
        note = {"error": f"{type(error).__name__}: {error}"[:300]}
    _report(note)


def _report(note: dict[str, Any]) -> None:
    try:
        sys.stdout.flush()
        text = json.dumps(note)
    except BaseException as error:  # noqa: BLE001  the program's values, and its files
        note, text = {"error": ""}, json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})
    with contextlib.suppress(OSError):
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(3, data) :]
    os._exit(1 if "error" in note else 0)


def _function(module: types.ModuleType, name: str) -> Any:  # noqa: ANN401  a function of the program
    """The function of this name, or the method of the class `Solution`."""
    holder = module.Solution() if hasattr(module, "Solution") and not hasattr(module, name) else module
    return getattr(holder, name)


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
