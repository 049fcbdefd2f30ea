"""Every Redis key of Millrace. A job's keys share one hash tag, so that a cluster keeps them on one node.

millrace:queue                   zset    job ids waiting for a learner, by submission
millrace:jobs                    zset    all job ids, by submission
millrace:held                    zset    job ids that a learner has taken and not ended, by when it took them
millrace:active                  hash    job id → ActiveJob: what rollout and reward servers attach to
millrace:order                   string  how many jobs were submitted
millrace:idempotency:<digest>    hash    spec digest and job of an Idempotency-Key; expires
millrace:restored:<who>          string  that <who> has put its jobs back since Redis was emptied
millrace:workers                 set     worker names; each has millrace:worker:<name>, which expires
millrace:incarnation:<worker>    hash    the newest process of a worker's name; expires
millrace:serving:<worker>        hash    job id → mark that this worker's process serves it; expires
millrace:{<job>}:record          hash    the job's record
millrace:{<job>}:events          stream  what happened, for people (capped)
millrace:{<job>}:steps           list    one JSON object per optimizer step
millrace:{<job>}:evals           list    one JSON object per evaluation
millrace:{<job>}:samples         list    the newest judged groups with their text (capped)
millrace:{<job>}:<stage>         stream  tasks | rollouts | scored: work, never trimmed
millrace:{<job>}:seen:<stage>    set     members already added to that stream
millrace:{<job>}:dead:<stage>    stream  entries that could not be used, with the reason
millrace:{<job>}:dead-bytes      hash    stage → bytes of payload that its dead letters keep
millrace:{<job>}:deaths          list    processes that died while they served the job (capped); expires
millrace:{<job>}:once:<token>    string  a command that has had its effect, in case it is repeated; expires
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

QUEUE = "millrace:queue"
JOBS = "millrace:jobs"
HELD = "millrace:held"
ACTIVE = "millrace:active"
ORDER = "millrace:order"
WORKERS = "millrace:workers"


class Stage(StrEnum):
    """A work stream of a job, named by what it carries."""

    TASKS = "tasks"
    ROLLOUTS = "rollouts"
    SCORED = "scored"


def worker(name: str) -> str:
    """A worker's heartbeat record."""
    return f"millrace:worker:{name}"


def incarnation(name: str) -> str:
    """Which process of a worker's name is the newest."""
    return f"millrace:incarnation:{name}"


def serving(name: str) -> str:
    """Which jobs a worker's process serves."""
    return f"millrace:serving:{name}"


def idempotency(key: str) -> str:
    """What an Idempotency-Key of a client's own stands for."""
    return f"millrace:idempotency:{hashlib.sha256(key.encode()).hexdigest()}"


def record(job_id: str) -> str:
    """The job's record."""
    return f"millrace:{{{job_id}}}:record"


def events(job_id: str) -> str:
    """The job's events."""
    return f"millrace:{{{job_id}}}:events"


def steps(job_id: str) -> str:
    """The job's history, step by step."""
    return f"millrace:{{{job_id}}}:steps"


def evals(job_id: str) -> str:
    """The job's evaluations."""
    return f"millrace:{{{job_id}}}:evals"


def samples(job_id: str) -> str:
    """The job's newest samples."""
    return f"millrace:{{{job_id}}}:samples"


def stream(job_id: str, stage: Stage) -> str:
    """A work stream."""
    return f"millrace:{{{job_id}}}:{stage}"


def seen(job_id: str, stage: Stage) -> str:
    """The dedupe set of a work stream."""
    return f"millrace:{{{job_id}}}:seen:{stage}"


def dead(job_id: str, stage: Stage) -> str:
    """The dead-letter stream of a work stream."""
    return f"millrace:{{{job_id}}}:dead:{stage}"


def dead_bytes(job_id: str) -> str:
    """How much the dead letters of each stage keep."""
    return f"millrace:{{{job_id}}}:dead-bytes"


def deaths(job_id: str) -> str:
    """The processes that died while they served the job."""
    return f"millrace:{{{job_id}}}:deaths"


def once(job_id: str, token: str) -> str:
    """That the command with this token has had its effect."""
    return f"millrace:{{{job_id}}}:once:{token}"


def restored(who: str) -> str:
    """That this process has put its jobs back since Redis was emptied."""
    return f"millrace:restored:{who}"


def archived(job_id: str) -> list[str]:
    """The keys that go some time after the job's end: all but its record."""
    dead_letters = [dead(job_id, stage) for stage in Stage]
    histories = [events(job_id), steps(job_id), evals(job_id), samples(job_id)]
    return [*histories, *dead_letters, dead_bytes(job_id), deaths(job_id), *work(job_id)]


def work(job_id: str) -> list[str]:
    """The keys that hold work in flight, to be deleted when the job has ended."""
    return [key(job_id, stage) for stage in Stage for key in (stream, seen)]
