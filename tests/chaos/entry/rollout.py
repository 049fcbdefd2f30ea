"""The rollout service on the scripted engine, with fail points; a second one of its name has a stage of its own, as on another machine.

Beside hostile jobs (MILLRACE_CHAOS_BESIDE) rollout-0 serves the good job only, and the others only the hostile ones: as it would be with
machines enough. Tokenizers and templates are then the real ones, of the job's own model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.jobs.record import ActiveJob
from services.rollout import service, session
from services.rollout.__main__ import main
from services.rollout.engine import engine
from tests.chaos import held
from tests.chaos.entry import tamper
from tests.chaos.scripted.engine import SECONDS, ScriptedEngine, ScriptedPrompts
from tests.chaos.stack import BESIDE, GOOD, REAL, SECOND


def of_the_good(active: Mapping[str, ActiveJob], *, good: bool) -> dict[str, ActiveJob]:
    """The active jobs that are, or are not, the good one."""
    return {job_id: job for job_id, job in active.items() if job_id.startswith(GOOD) == good}


def part_jobs(*, good: bool) -> None:
    """Lets this server see only its own jobs."""
    choose = vars(service)["choose"]

    def chosen(active: Mapping[str, ActiveJob], *others: Any) -> ActiveJob | None:
        found: ActiveJob | None = choose(of_the_good(active, good=good), *others)
        return found

    vars(service)["choose"] = chosen


if __name__ == "__main__":
    of_good = os.environ["MILLRACE_WORKER"] == "rollout-0"
    if BESIDE in os.environ:
        part_jobs(good=of_good)
        if of_good:
            os.environ[SECONDS] = os.environ[BESIDE]
    else:
        vars(engine)["PromptProcess"] = ScriptedPrompts
    if REAL not in os.environ or of_good:
        vars(service)["Engine"] = ScriptedEngine
    if SECOND in os.environ:
        vars(session)["default_stage_directory"] = lambda worker, home, *_: home / "second" / worker
    held.watch_rollouts(Path(os.environ["MILLRACE_HOME"]) / "chaos")
    tamper("rollout")
    main()
