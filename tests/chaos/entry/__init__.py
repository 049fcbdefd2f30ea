"""Entry points of the services under chaos: the real `main`, after what stands in was put in place."""

from __future__ import annotations

import os
from pathlib import Path

from tests.chaos import failpoints, waits


def tamper(service: str) -> None:
    """Installs the service's fail points, idle until the harness arms them; and watches its waits."""
    folder = Path(os.environ["MILLRACE_HOME"]) / "chaos"
    failpoints.install(service, folder)
    waits.install(service, folder)
