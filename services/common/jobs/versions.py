"""Versions that a job was trained with: `versions.jsonl` in its folder, a line for each start on other ones.

{"at": …, "service": "learner", "release": "0.1.0", "git": "v0.1.0-12-gabc1234", "python": "3.11.7", "platform": "Linux-…", "packages": {…}}
"""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from services.common.jobs.folder import is_deleted
from services.common.service.host import installed_version

log = logging.getLogger(__name__)

VERSIONS_FILE = "versions.jsonl"
GIT_TIMEOUT_S = 5.0
SOURCES = Path(__file__).parents[3]


def record_versions(folder: Path, service: str) -> None:
    """Adds what this process runs on, unless the service's last line says the same. A failure is logged: the job goes on."""
    path, found = folder / VERSIONS_FILE, {"service": service, **versions()}
    try:
        if is_deleted(folder) or found == _last(path, service):
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), **found}) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror or error)


def versions() -> dict[str, Any]:
    """Release, state of the source tree, interpreter, platform, and every installed package."""
    packages = {item.metadata["Name"]: item.version for item in distributions() if item.metadata["Name"]}
    return {
        "release": installed_version("millrace") or "unknown",
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _git() -> str:
    """`git describe` of the source tree; empty where there is none, or no git."""
    if not (SOURCES / ".git").exists():
        return ""
    command = ["git", "-C", str(SOURCES), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _last(path: Path, service: str) -> dict[str, Any] | None:
    """The service's newest line, without its time; None without one."""
    found = None
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict) and item.get("service") == service:
            found = {name: value for name, value in item.items() if name != "at"}
    return found
