"""The Python that runs this command, and so all services."""

from __future__ import annotations

import platform
import sys

from services.cli.checks.finding import Finding, Subject, ok, problem

OLDEST, BEYOND = (3, 11), (3, 13)


def check_python(_: Subject) -> list[Finding]:
    """Whether its version is one that the dependencies are built for."""
    found = f"{platform.python_version()} at {sys.executable}"
    if OLDEST <= sys.version_info[:2] < BEYOND:
        return [ok("python", found)]
    return [problem("python", found, "use Python 3.11 or 3.12: make a virtual environment with it and install again")]
