"""A learner's weights' process that sends a share of its chunks wrongly, if the environment says so."""

from __future__ import annotations

import os
from pathlib import Path

from services.learner.weights import process
from tests.chaos import tamper

if __name__ == "__main__":
    tamper.install(Path(os.environ["MILLRACE_HOME"]) / "chaos")
    process.main()
