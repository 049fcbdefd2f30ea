"""Recorded steps of a job, trained again with nothing beside: started by torchelastic, as the ranks of a job are.

    python -m benchmarks.peers.recorded JOB_FOLDER LAST_STEP

journal ─► batch ─► the ranks' train call ─► one JSON line per step on standard output: {"step": 3, "train_s": 0.18}

The call goes through the same client and the same loop as a job's, from a thread of rank 0: its time covers what a step's `train_s` covers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.processes import Child
from services.cli.stack.plan import available_cores, plan_cores
from services.common.config.settings import load_settings
from services.common.jobs.folder import SPEC_FILE
from services.common.spec.job import JobSpec, parse_recorded_spec
from services.learner.ranks.launch import Nodes, launch_command, rank_environment
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal

if TYPE_CHECKING:
    from services.learner.ranks.client import Ranks

LIMIT_S = 900.0


def train_again(home: Path, job_id: str, last: int, folder: Path) -> dict[int, float]:
    """Step → seconds of its training, with nothing beside. `folder`: for logs.

    Raises:
        SideError: the ranks failed, or took longer than LIMIT_S.
    """
    settings = load_settings().model_copy(update={"home": home})
    spec = _spec_of(settings.job_dir(job_id))
    environment = rank_environment(settings, job_id, spec, folder / "metrics") | {
        "MILLRACE_STACK_CORES": ",".join(map(str, available_cores())),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "cache" / "torchinductor"),
    }
    arguments = Nodes().torchrun_arguments("recorded", spec.learner.world_size)
    command = launch_command(arguments, 0, "benchmarks.peers.recorded", str(settings.job_dir(job_id)), str(last))
    with Child(command, folder / "recorded.log", LIMIT_S, environment) as child:
        found = [json.loads(line) for line in child.lines() if line.startswith('{"step"')]
    return {line["step"]: line["train_s"] for line in found}


def _spec_of(folder: Path) -> JobSpec:
    return parse_recorded_spec((folder / SPEC_FILE).read_text())


async def drive(ranks: Ranks, folder: Path, spec: JobSpec, last: int) -> None:
    """Gives the ranks the journal's batches, one after the other, up to step `last`, and prints the time of each."""
    from services.learner.groups.batch import Batch

    for record in Journal(folder / JOURNAL_DIR).records():
        if record.step > last:
            break
        if record.groups:
            sequences = Batch.of_payloads(record.groups, spec).sequences
            began = time.monotonic()
            await ranks.train(record.step, sequences)
            print(json.dumps({"step": record.step, "train_s": time.monotonic() - began}), flush=True)
    await ranks.finish()


def run_rank(folder: Path, last: int) -> None:
    """This rank's part of the model, on the cores that a stack's learner has, until all steps are trained."""
    spec, settings = _spec_of(folder), load_settings()
    import torch.distributed as dist

    from services.common.models.roles import RoleModels
    from services.common.service.lifecycle import freeze_heap
    from services.learner.rank import take_cores
    from services.learner.ranks.client import Ranks
    from services.learner.ranks.loop import build_trainer, run_loop
    from services.learner.training.rendezvous import leave_process_group

    if cores := plan_cores(available_cores(), 1).learner:
        os.sched_setaffinity(0, cores)
    take_cores(int(os.environ["LOCAL_WORLD_SIZE"]) * spec.learner.threads_per_rank)
    trainer = build_trainer(spec, RoleModels(Path(spec.model.path)), settings.platform)
    freeze_heap()
    ranks = Ranks() if dist.get_rank() == 0 else None
    if ranks is not None:
        threading.Thread(target=_head, args=(ranks, folder, spec, last), name="head", daemon=True).start()
    run_loop(trainer, ranks)
    leave_process_group()


def _head(ranks: Ranks, folder: Path, spec: JobSpec, last: int) -> None:
    try:
        asyncio.run(drive(ranks, folder, spec, last))
    except BaseException as error:
        ranks.fail(error)
        raise


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
