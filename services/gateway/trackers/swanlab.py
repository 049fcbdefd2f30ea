"""SwanLab: a run whose id is the job's. A batch is a session of its own, which ends when the server has its points.

The server keeps a value for each name and step; the client continues after the newest step of each name, so points that are sent again
are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from services.gateway.trackers.history import Point
from services.gateway.trackers.sink import Run

STATES = {"": "success", "succeeded": "success", "failed": "crashed", "cancelled": "aborted"}


class SwanLab:
    """The run of one job."""

    def __init__(self, run: Run) -> None:
        """Imports the client; its key stays in this process's memory."""
        self._run = run
        self.whole = run.options["mode"] == "offline"
        self._folder = run.tracker_folder / "swanlab"
        self._folder.mkdir(exist_ok=True)
        os.environ["SWANLAB_ROOT"] = str(self._folder / "config")
        import swanlab

        self._swanlab = swanlab
        self._signed_in = False

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        """One session: the points, and its end, which returns when all is uploaded."""
        del own
        run, lab = self._run, self._swanlab
        if not self.whole and not self._signed_in:
            lab.login(api_key=run.options["api_key"], host=run.options.get("url"), save=False)
            self._signed_in = True
        settings = lab.Settings(
            interactive=False,
            probe=lab.Settings.Probe(
                monitor=False, hardware=False, git=False, runtime=False, requirements=False, conda=False
            ),
            terminal=lab.Settings.Terminal(proxy_type="none"),
        )
        session = lab.init(
            reinit=True, mode=run.options["mode"], workspace=run.options.get("workspace"), project=run.project, name=run.name,
            id=run.job_id, resume="allow", tags=run.tags, config=run.config, log_dir=str(self._folder), settings=settings,
        )  # fmt: skip
        for point in points:
            session.log(point.values, step=point.step)
        session.finish(STATES[ended], error="the job failed" if ended == "failed" else None)
        return {}
