"""Weights & Biases: a run whose id is the job's. A batch is a session of its own, since only its end proves that the server has the points.

The run's own step is the number of the history's line, and charts are drawn over `step`. The server continues a run after its newest own
step, so points that are sent again are passed over. Between two sessions the run stays `running`; the last one gives it its state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from services.gateway.trackers.history import Point
from services.gateway.trackers.sink import Run

EXIT_CODES = {"succeeded": 0, "failed": 1, "cancelled": 255}


class WandB:
    """The run of one job."""

    def __init__(self, run: Run) -> None:
        """Imports the client, which reads its key from this process's environment."""
        self._run = run
        self.whole = run.options["mode"] == "offline"
        self._folder = run.tracker_folder / "wandb"
        self._folder.mkdir(exist_ok=True)
        own = {f"WANDB_{kind}_DIR": str(self._folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        os.environ |= {"WANDB_API_KEY": run.options.get("api_key", ""), "WANDB_ERROR_REPORTING": "false", **own}
        import wandb

        self._wandb = wandb

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        """One session: the points, and its end, which returns when all is uploaded."""
        del own
        run, options = self._run, self._run.options
        session = self._wandb.init(
            project=run.project, entity=options.get("entity"), name=run.name, id=run.job_id, resume="allow", tags=run.tags,
            config=run.config, dir=str(self._folder), mode=options["mode"], reinit="finish_previous",
            settings=self._wandb.Settings(
                base_url=options["url"], console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
                x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
                x_update_finish_state=bool(ended),
            ),
        )  # fmt: skip
        session.define_metric("*", step_metric="step")
        for point in points:
            session.log({**point.values, "step": point.step, "_timestamp": point.at}, step=point.line)
        session.finish(exit_code=EXIT_CODES[ended] if ended else 0)
        return {}
