"""One machine's ranks meet where nobody else can reach them, and meet again after one has died."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from services.learner.ranks.launch import Nodes, launch_command
from services.learner.training.rendezvous import STORE

WAIT_S = 120.0

RANK = f"""
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from services.learner.training.rendezvous import join_process_group

folder, attempt, rank = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
joined = join_process_group("gloo", timedelta(seconds=60), pools=int(sys.argv[2]))
value = torch.ones(1)
dist.all_reduce(value)
told = torch.tensor([rank])
if joined.between is not None:
    joined.between.broadcast(told, 3).wait()
said = [value.item(), joined.pool, int(told), os.environ["{STORE}"]]
(folder / f"met-{{attempt}}-{{rank}}.json").write_text(json.dumps(said))
while not (folder / "go").exists():
    time.sleep(0.05)
if attempt == 0 and rank == 1:
    os._exit(1)
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("pools", [1, 2])
def test_ranks_meet_on_no_port_that_others_reach_and_meet_again_after_a_death(tmp_path: Path, pools: int) -> None:
    ranks = 2 * pools
    (tmp_path / "house_rank.py").write_text(RANK)
    command = launch_command(Nodes().torchrun_arguments("job-1", ranks), 1, "house_rank", str(tmp_path), str(pools))
    environment = {
        "PYTHONPATH": f"{Path.cwd()}:{tmp_path}",
        "TMPDIR": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for([tmp_path / f"met-0-{rank}.json" for rank in range(ranks)], process)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        heard = [
            one.laddr.ip for each in family for one in each.net_connections("inet") if one.status == psutil.CONN_LISTEN
        ]
        (tmp_path / "go").touch()
        said, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert {address.removeprefix("::ffff:") for address in heard} <= {"127.0.0.1"}
    met = [
        json.loads((tmp_path / f"met-{attempt}-{rank}.json").read_text()) for attempt in (0, 1) for rank in range(ranks)
    ]
    assert [count for count, *_ in met] == [2.0] * 2 * ranks, "the world of torch.distributed is the pool"
    assert [pool for _, pool, *_ in met] == [rank // 2 for rank in range(ranks)] * 2
    assert [told for _, _, told, _ in met] == (list(range(ranks)) if pools == 1 else [3] * ranks) * 2
    assert len({store for *_, store in met}) == 2
    assert [path.name for path in tmp_path.glob("millrace-meet-*")] == []


def wait_for(files: list[Path], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)
