"""Rubric of two verifiers, of which a process is killed, or stands still, again and again: no group is lost, none gets half a reward."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import psutil

from services.common.jobs.folder import SPEC_FILE
from services.common.spec.job import parse_spec
from services.common.streams.codec import decode
from services.common.streams.limits import entry_limit
from services.common.streams.types import ScoredGroup
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal
from tests.chaos.campaign import ENDLESS, campaign
from tests.chaos.faults import Options, victim
from tests.chaos.job import job_spec
from tests.chaos.result import Result
from tests.chaos.stack import Stack

NAME = "both"
WEIGHTS = {"gsm8k": 1.0, "format": 0.5}
"""The form is always right: a reward is 0.5 or 1.5, or a part of it is missing."""
LIMIT_S = 2.0
FIND_S = 30.0

REWARD = {
    "verifiers": {"*": NAME},
    "rubrics": {
        NAME: {"verifier_function": [*WEIGHTS], "verifier_weight": [*WEIGHTS.values()], "accuracy_of": "gsm8k"}
    },
    "config": {"format": {"format_pattern": ".*"}},
    "timeout_s": LIMIT_S,
}


def rubric(options: Options) -> Result:
    """SIGKILL or SIGSTOP of a process that judges a part of the rubric."""
    spec = job_spec(steps=ENDLESS, reward=REWARD)
    with campaign(options.home, "verifier of a rubric killed or stopped", options.seed, spec=spec) as running:

        def strike() -> None:
            process = running.random.choice(_verifiers(running.stack))
            process.send_signal(running.random.choice((signal.SIGKILL, signal.SIGSTOP)))

        for _ in range(options.count):
            running.trial(strike)
        running.finish()
        found = _rewards(running.folder)
        if odd := {reward: count for reward, count in found.items() if reward not in {0.5, 1.5}}:
            running.result.violations.append(f"rewards of half a rubric: {odd}")
        running.result.extra |= {"trained rewards": {str(reward): found[reward] for reward in (0.5, 1.5)}}
    return running.result


def _rewards(folder: Path) -> Counter[float | None]:
    """How often each reward was trained."""
    spec = parse_spec((folder / SPEC_FILE).read_text())
    limit_bytes = entry_limit(spec.rollout, spec.eval)
    groups = (group for record in Journal(folder / JOURNAL_DIR).records() for group in record.groups)
    return Counter(verdict.reward for group in groups for verdict in decode(ScoredGroup, group, limit_bytes).verdicts)


def _verifiers(stack: Stack) -> list[psutil.Process]:
    """The processes that judge: children of the reward service's forkserver. There may be none for a moment."""
    until = time.monotonic() + FIND_S
    while time.monotonic() < until:
        service = victim(stack, "reward")
        try:
            forkservers = service.children()
            found = [child for forkserver in forkservers for child in forkserver.children()]
        except psutil.NoSuchProcess:
            found = []
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError("the reward service has no verifier processes")
