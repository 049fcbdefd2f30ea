"""Run of a conversion: its process, the unfinished folder that it writes, and the rename at the end.

<out> is made whole or not at all:  .<name>.<random>.tmp beside it ─► process ─► fsync ─► rename; removed where anything fails
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from services.common.durable import fsync_directory
from services.common.errors import ConfigError, MillraceError, Problem
from services.common.service.process_tree import kill_group
from services.learner.conversion.request import Conversion, Converted

WORKER = "services.learner.conversion.worker"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Of a launcher, around which this is no rank."""


class ConversionError(MillraceError):
    """The process of a conversion ended without a result; the message has its last lines."""


def run(request: Conversion) -> Converted:
    """Converts in a process of its own; nothing is left at `request.out` if that fails or is interrupted.

    Raises:
        ConfigError: `out` exists or cannot be made, or what is converted is not fit; names the file and the field.
        ConversionError: the process died.
    """
    out = Path(request.out)
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already: name a directory that is not, or remove it")
    unfinished = out.parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
    try:
        unfinished.mkdir()
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}") from error
    try:
        converted = _run(request, unfinished)
        _publish(unfinished)
        unfinished.rename(out)
        fsync_directory(out.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return converted


def _publish(folder: Path) -> None:
    """Lets whoever may read the folder read its files, and makes their names durable."""
    mode = folder.stat().st_mode & 0o666
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            fsync_directory(path)
        else:
            path.chmod(mode)


def _run(request: Conversion, folder: Path) -> Converted:
    inherited = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="millrace-weights-") as made:
        work = Path(made)
        request.write(work / "request.json")
        arguments = [str(work / "request.json"), str(folder), str(work / "result.json")]
        with (work / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER, *arguments],
                env=inherited | _ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    kill_group(process.pid)
                    process.wait()
        return _result(work, status)


def _result(work: Path, status: int) -> Converted:
    file = work / "result.json"
    said: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if "problems" in said:
        raise ConfigError(*(Problem(field, message) for field, message in said["problems"]))
    if status != 0 or "converted" not in said:
        tail = (work / "log").read_text(errors="replace").strip().splitlines()[-5:]
        reason = f"signal {-status}, as for lack of memory" if status < 0 else f"exit code {status}"
        raise ConversionError("\n".join([f"the conversion's process ended: {reason}", *tail]))
    return Converted(**said["converted"])
