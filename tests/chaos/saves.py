"""The learner is killed while it saves a checkpoint: what it resumes from is a checkpoint that verifies."""

from __future__ import annotations

from services.common.checkpoints.manifest import CHECKPOINTS_DIR, newest_manifest
from tests.chaos import failpoints
from tests.chaos.campaign import ENDLESS, PATIENCE_S, campaign
from tests.chaos.faults import Options
from tests.chaos.job import job_spec
from tests.chaos.points import die_at
from tests.chaos.result import Result

SAVE_S = 0.05
"""About as long as the scripted ranks' checkpoint takes."""
RESUMED = "resuming from the checkpoint of step"
"""What a learner logs once every file of it has been verified."""


def saves(options: Options) -> Result:
    """Kills at a random moment of the save, at every other fail point of it, `count` in all."""
    spec = job_spec(steps=ENDLESS, interval_steps=4, ranks=options.ranks)
    inside = [point for point in failpoints.POINTS if point.startswith(("rank.checkpoint.", "rank.ranks.save"))]
    with campaign(options.home, "learner killed while it saves a checkpoint", options.seed, spec=spec) as running:
        checkpoints = running.folder / CHECKPOINTS_DIR
        running.stack.wait(lambda: newest_manifest(checkpoints) is not None, "the first checkpoint", PATIENCE_S)
        torn = 0

        def strike(point: str, delay_s: float) -> None:
            nonlocal torn
            die_at(running, point, delay_s)
            torn += any(checkpoints.glob("step-*.tmp"))

        for _ in range(options.count):
            if running.random.random() < 0.5:
                point, delay_s = "rank.checkpoint.begin:before", running.random.uniform(0.0, SAVE_S)
            else:
                point, delay_s = running.random.choice(inside), 0.0
            running.trial(lambda point=point, delay_s=delay_s: strike(point, delay_s), pause_s=0.3, lies_in_wait=True)  # type: ignore[misc]
        resumed = running.stack.said("learner-0", RESUMED)
        if resumed < options.count:
            running.result.violations.append(f"{options.count} kills, and only {resumed} resumes from a checkpoint")
        running.result.extra |= {"resumes from a verified checkpoint": resumed, "unfinished checkpoints left": torn}
        running.finish()
    return running.result
