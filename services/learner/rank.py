"""Rank of a job: one process of its training back end, started by torchelastic. Rank 0 also runs the head, in a thread.

The environment variable MILLRACE_JOB names the job; the job's folder holds its resolved spec.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.config.settings import STACK_CORES, Settings, load_settings
from services.common.errors import Fenced
from services.common.jobs.folder import SPEC_FILE
from services.common.models.roles import RoleModels
from services.common.service.lifecycle import freeze_heap
from services.common.service.logs import configure_logging, log_context
from services.common.service.process_tree import die_with_parent, end_process
from services.common.spec.job import JobSpec, parse_recorded_spec
from services.learner.ranks.heartbeat import HEARTBEAT_DIR_VARIABLE, beat_forever
from services.learner.storage.folder import ERROR_FILE, FENCED_FILE

if TYPE_CHECKING:
    from services.learner.controller import Head

log = logging.getLogger(__name__)

HEAD_JOIN_S = 30.0


def run_rank(job_id: str, settings: Settings) -> None:
    """Builds this rank's part of the model and runs its loop until the job ends."""
    spec = parse_recorded_spec((settings.job_dir(job_id) / SPEC_FILE).read_text())
    models = RoleModels.of(spec, settings)
    from services.learner.ranks.loop import build_trainer, run_loop
    from services.learner.training.rendezvous import leave_process_group

    take_cores(int(os.environ["LOCAL_WORLD_SIZE"]) * spec.learner.threads_per_rank)
    trainer = build_trainer(spec, models, settings.platform)
    freeze_heap()
    head = _start_head(job_id, spec, models.actor, settings) if trainer.pools.leads else None
    run_loop(trainer, head.ranks if head else None)
    if head:
        head.join(HEAD_JOIN_S)
    leave_process_group()


def take_cores(threads: int) -> None:
    """Lets this process, and what it starts, run on all cores of its stack where its ranks have more threads than cores of their own.

    `millrace up` gives learner and engine half of the cores each. With more threads a job also takes what the engine leaves idle.
    """
    cores = os.environ.get(STACK_CORES)
    if cores and threads > len(os.sched_getaffinity(0)):
        os.sched_setaffinity(0, map(int, cores.split(",")))


def _start_head(job_id: str, spec: JobSpec, model_dir: Path, settings: Settings) -> Head:
    from services.learner.controller import Head
    from services.learner.ranks.client import Ranks

    head = Head(job_id, spec, model_dir, settings, Ranks())
    signal.signal(signal.SIGTERM, lambda *_: head.drain())
    head.start()
    return head


def main() -> None:
    """Entry point of a rank; an error is written into the job's folder, where the agent reads it."""
    die_with_parent(signal.SIGKILL)
    launcher = os.getppid()
    settings, job_id, rank = load_settings(), os.environ["MILLRACE_JOB"], int(os.environ["RANK"])
    configure_logging("learner", settings.log_level)
    if HEARTBEAT_DIR_VARIABLE in os.environ:
        beat_forever(Path(os.environ[HEARTBEAT_DIR_VARIABLE]), f"rank {rank}", os.getpid())
    if rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 drains and commands the others
    status = 1
    with log_context(job_id=job_id, rank=rank):
        try:
            run_rank(job_id, settings)
            status = 0
        except Fenced as error:
            # The process that runs the job now is not a child of this launcher, which must not start ranks again.
            log.error("%s", error)  # noqa: TRY400  the message is enough
            (settings.job_dir(job_id) / FENCED_FILE).write_text(str(error))
            if os.getppid() == launcher:
                os.kill(launcher, signal.SIGTERM)
        except Exception as error:
            log.exception("rank %d failed", rank)
            # Only the first failure is kept: later errors only report that a rank has ended.
            error_file = settings.job_dir(job_id) / ERROR_FILE
            with contextlib.suppress(FileExistsError), error_file.open("x") as file:
                file.write(f"rank {rank}: {type(error).__name__}: {error}")
    # At once: waiting for the gRPC threads that serve rollout servers would delay the other ranks' restart by 30 s.
    end_process(status)


if __name__ == "__main__":
    main()
