"""MLflow: a run of the tracking server, found again by its tag with the job's id.

A point's time is its record's, so a batch that is sent again consists of the same rows, of which the server keeps one each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from services.gateway.trackers.history import Point
from services.gateway.trackers.sink import Run, flat

JOB_TAG = "millrace.job_id"
ROWS = 1000
"""Most metrics of one request."""
PARAMS = 100
"""Most parameters of one request."""
VALUE_CHARS = 6000
"""Longest value of a parameter."""
STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_VARIABLES = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


class MLflow:
    """The run of one job."""

    whole = False

    def __init__(self, run: Run) -> None:
        """Imports the client, which reads its credentials from this process's environment."""
        os.environ |= {name: run.options[name] for name in _VARIABLES if name in run.options}
        # The next batch is the next try.
        os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
        from mlflow import MlflowClient

        self._run = run
        self._client = MlflowClient(tracking_uri=run.options["uri"])

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        """Sends the points' rows; each request is answered when its rows are stored. `own`: the run's id."""
        from mlflow.entities import Metric

        run_id = str(own["run_id"]) if "run_id" in own else self._begin()
        rows = [
            Metric(name, value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(rows), ROWS):
            self._client.log_batch(run_id, metrics=rows[first : first + ROWS], synchronous=True)
        if ended:
            self._client.set_terminated(run_id, STATUS[ended])
        return {"run_id": run_id}

    def _begin(self) -> str:
        """The id of the run, which is made where it does not exist, with the job's spec as its parameters."""
        from mlflow.entities import Param

        client, run = self._client, self._run
        known = client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known is not None else client.create_experiment(run.project)
        found = client.search_runs([experiment], f"tags.`{JOB_TAG}` = '{run.job_id}'", max_results=1)
        tags = {JOB_TAG: run.job_id, **dict.fromkeys(run.tags, "true")}
        made = found[0] if found else client.create_run(experiment, tags=tags, run_name=run.name)
        params = [Param(name, value[:VALUE_CHARS]) for name, value in flat(run.config).items()]
        for first in range(0, len(params), PARAMS):
            client.log_batch(made.info.run_id, params=params[first : first + PARAMS], synchronous=True)
        return str(made.info.run_id)
