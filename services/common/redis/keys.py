"""Redis keys of Millrace, all of them. The keys of a job share one hash tag, so that a cluster keeps them on one node.

millrace:queue                   zset    job ids waiting for a learner, by submission
millrace:fetches                 zset    job ids whose models or data are fetched from a hub first, by submission
millrace:jobs                    zset    all job ids, by submission
millrace:held                    zset    job ids that a learner has taken and not ended, by when it took them
millrace:active                  hash    job id → ActiveJob: what rollout and reward servers attach to
millrace:order                   string  how many jobs were submitted
millrace:idempotency:<digest>    hash    spec digest and job of an Idempotency-Key; expires
millrace:restored:<process>      string  mark: this process has restored its jobs since Redis was emptied
millrace:trials                  list    trials of a section `reward` that wait for a reward server; expires
millrace:trial:<token>           string  the reply to one; expires
millrace:workers                 set     worker names; each has millrace:worker:<name>, which expires
millrace:incarnation:<worker>    hash    the newest process of a worker's name; expires
millrace:serving:<worker>        hash    job id → mark: this worker's process serves it; expires
millrace:{<job>}:record          hash    the job's record
millrace:{<job>}:events          stream  events, for people (capped)
millrace:{<job>}:steps           list    one JSON object per optimizer step
millrace:{<job>}:evals           list    one JSON object per evaluation
millrace:{<job>}:samples         list    the newest judged groups with their text (capped)
millrace:{<job>}:<stage>         stream  tasks | rollouts | scored: work, never trimmed
millrace:{<job>}:seen:<stage>    set     members already added to that stream
millrace:{<job>}:dead:<stage>    stream  entries that could not be used, with the reasons
millrace:{<job>}:dead-bytes      hash    stage → bytes of payload that its dead letters keep
millrace:{<job>}:deaths          list    processes that died while they served the job (capped); expires
millrace:{<job>}:once:<token>    string  mark: the command with this token has had its effect (it may be repeated); expires
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum

QUEUE = "millrace:queue"
FETCHES = "millrace:fetches"
JOBS = "millrace:jobs"
HELD = "millrace:held"
ACTIVE = "millrace:active"
ORDER = "millrace:order"
WORKERS = "millrace:workers"
TRIALS = "millrace:trials"


class Stage(StrEnum):
    """A work stream of a job, named by what it carries."""

    TASKS = "tasks"
    ROLLOUTS = "rollouts"
    SCORED = "scored"


def _named(kind: str) -> Callable[[str], str]:
    return lambda name: f"millrace:{kind}:{name}"


def _of_job(name: str) -> Callable[[str], str]:
    return lambda job_id: f"millrace:{{{job_id}}}:{name}"


def _of_stage(prefix: str) -> Callable[[str, Stage], str]:
    return lambda job_id, stage: f"millrace:{{{job_id}}}:{prefix}{stage}"


worker = _named("worker")
incarnation = _named("incarnation")
serving = _named("serving")
restored = _named("restored")
trial = _named("trial")

record = _of_job("record")
events = _of_job("events")
steps = _of_job("steps")
evals = _of_job("evals")
samples = _of_job("samples")
dead_bytes = _of_job("dead-bytes")
deaths = _of_job("deaths")

stream = _of_stage("")
seen = _of_stage("seen:")
dead = _of_stage("dead:")


def idempotency(key: str) -> str:
    """The key of a client's Idempotency-Key."""
    return f"millrace:idempotency:{hashlib.sha256(key.encode()).hexdigest()}"


def once(job_id: str, token: str) -> str:
    """The key which exists after the command with this token has had its effect."""
    return f"millrace:{{{job_id}}}:once:{token}"


def archived(job_id: str) -> list[str]:
    """The keys that are deleted some time after the job's end: all but its record."""
    dead_letters = [dead(job_id, stage) for stage in Stage]
    histories = [events(job_id), steps(job_id), evals(job_id), samples(job_id)]
    return [*histories, *dead_letters, dead_bytes(job_id), deaths(job_id), *work(job_id)]


def work(job_id: str) -> list[str]:
    """The keys of work in flight, deleted when the job ends."""
    return [key(job_id, stage) for stage in Stage for key in (stream, seen)]
