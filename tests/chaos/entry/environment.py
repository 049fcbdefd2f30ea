"""The environment service, with fail points, and notes of how long its places are held."""

from __future__ import annotations

import os
from pathlib import Path

from services.environment import service
from services.environment.__main__ import main
from tests.chaos import held
from tests.chaos.entry import tamper

if __name__ == "__main__":
    vars(service)["Players"] = held.watch_places(Path(os.environ["MILLRACE_HOME"]) / "chaos")
    tamper("environment")
    main()
