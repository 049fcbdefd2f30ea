"""Stands where a job's rank does: meets the others over gloo, and dies once on node 1, so that all are started again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import redis
import torch
import torch.distributed as dist

from services.common.jobs.record import JobState
from services.common.redis import keys


def main() -> None:
    """Writes what this rank saw; rank 0 ends the job."""
    job_id, out = os.environ["MILLRACE_JOB"], Path(os.environ["MILLRACE_HOME"]) / "seen"
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    out.mkdir(exist_ok=True)
    name = os.environ["PROMETHEUS_MULTIPROC_DIR"]
    if name.endswith("node1") and not (out / "died").exists():
        (out / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    seen = {"world": world, "sum": float(total), "metrics_dir": name, "local_rank": os.environ["LOCAL_RANK"]}
    (out / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    if rank == 0:
        client = redis.Redis.from_url(os.environ["REDIS_URL"])
        client.hset(keys.record(job_id), "state", JobState.SUCCEEDED)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
