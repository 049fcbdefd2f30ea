"""How long a new version takes from the learner into an engine on the same host, while the one trains and the other samples.

    python -m benchmarks.weight_switch [--model .millrace/models/smollm2-135m-instruct] [--versions 5]

The learner is a real trainer that takes one step after the other, with the real publisher; the engine is real, and always samples.
Each has one core where there are two. The model is made by
`python -m examples.demo.models smollm2 --out .millrace/models/smollm2-135m-instruct`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.common.config.settings import Platform, Settings
from services.common.spec.job import JobSpec
from services.common.weight_sync.staging import Stage, default_stage_directory
from services.common.weights.snapshot import PolicyVersion

ROOT = Path(__file__).resolve().parents[1]
JOB = "benchmark"
PROMPT = [1, 4093, 198, 2683, 418]
IN_FLIGHT = 32


def spec_of(model: Path, dtype: str) -> JobSpec:
    """As `demo-smollm2.yaml`."""
    return JobSpec.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype, "max_model_len": 256},
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "rollout": {"group_size": 8, "rollout_max_tokens": 64, "max_concurrent_groups": 4},
            "learner": {"max_tokens_per_micro_batch": 2048},
        }
    )


def learn(model: Path, dtype: str, stage: Path) -> None:
    """The learner: steps without end; a line of standard input asks for the next version."""
    from benchmarks.learner import SHAPES, batch_of
    from services.common.models.roles import RoleModels
    from services.learner.groups.sequence import Sequence
    from services.learner.ranks.client import Ranks
    from services.learner.ranks.loop import build_trainer, execute

    spec = spec_of(model, dtype)
    trainer = build_trainer(spec, RoleModels(model), Platform.CPU)
    batch = [Sequence(**item) for item in batch_of(SHAPES["smollm2"])]
    ranks = Ranks()
    threading.Thread(target=lambda: asyncio.run(publish(ranks, Stage(stage, keep=3))), daemon=True).start()
    while True:
        call = ranks.next(0.001)
        if call is not None:
            call.result.set_result(execute(trainer, call.command))
            continue
        trainer.train(batch)


async def publish(ranks: Any, stage: Stage) -> None:  # noqa: ANN401
    """The head: publishes a version for each line, and tells when."""
    from services.learner.weights.messages import Serve
    from services.learner.weights.publisher import Publisher

    serve = Serve(job_id=JOB, host="127.0.0.1", advertise_host=None, token=None, log_level="WARNING")
    publisher = await Publisher(stage).start(serve)
    print(json.dumps({"address": publisher.address}), flush=True)
    n = 0
    while await asyncio.to_thread(sys.stdin.readline):
        told = time.monotonic()
        written = told

        async def write(path: Path, n: int = n) -> None:
            nonlocal written
            await ranks.write_weights(path, lineage=1, n=n)
            written = time.monotonic()

        await publisher.publish(PolicyVersion(1, n), write)
        print(json.dumps({"told": told, "written": written, "announced": time.monotonic()}), flush=True)
        n += 1


async def sample(engine: Any, until: asyncio.Event) -> None:  # noqa: ANN401
    """Keeps a group in flight."""
    while not until.is_set():
        async with aclosing(engine.generate(PROMPT, count=8, temperature=1.0, max_tokens=64)) as pieces:
            async for _ in pieces:
                pass


async def measure(model: Path, dtype: str, versions: int, stage: Stage, learner: subprocess.Popen[str]) -> None:
    """Runs the rollout server's side, and prints the table."""
    from services.rollout.engine.engine import Engine
    from services.rollout.weights.client import WeightReceiver

    engine, stop = Engine(Platform.CPU), asyncio.Event()
    receiver = WeightReceiver((await asyncio.to_thread(told, learner))["address"], JOB, "r0", stage)
    sampling: list[asyncio.Task[None]] = []
    rows: list[dict[str, float]] = []
    try:
        await engine.start(model, spec_of(model, dtype))
        for n in range(versions + 1):
            newest, row = await switch(engine, receiver, learner, n)
            rows.append(row)
            if n == 0:
                sampling = [asyncio.create_task(sample(engine, stop)) for _ in range(IN_FLIGHT // 8)]
            await asyncio.sleep(5.0 if n == 0 else 2.0)
        stop.set()
        await asyncio.gather(*sampling)
        for row in rows:
            row["the file copied in memory"] = copied(newest)
    finally:
        receiver.close()
        await engine.aclose()
    for name in rows[0]:
        values = [row[name] for row in rows[1:]]
        print(f"{name:32} {statistics.median(values):8.2f}   ({min(values):.2f} to {max(values):.2f})")


async def switch(engine: Any, receiver: Any, learner: subprocess.Popen[str], n: int) -> tuple[Path, dict[str, float]]:  # noqa: ANN401
    """Publishes a version and takes it into use; returns its file and what each part took, seconds."""
    published = await asyncio.to_thread(told, learner, "next\n")
    staged = await asyncio.to_thread(receiver.fetch, 1, n)
    fetched = time.monotonic()
    done = await engine.activate(staged)
    in_use = time.monotonic()
    return staged.path, {
        "waits for the step, written": published["written"] - published["told"],
        "hashed, announced": published["announced"] - published["written"],
        "fetched": fetched - published["announced"],
        "activated": in_use - fetched,
        "announce → in use": in_use - published["announced"],
        "pause": done.pause_s,
        "… of it the load": done.apply_s,
        "MiB": staged.total_bytes / 2**20,
        "MiB on the wire": staged.wire_bytes / 2**20,
    }


def copied(path: Path) -> float:
    """Seconds of one thread for one copy of the file's tensors to memory that is there already: what no load goes below."""
    with safe_open(path, framework="pt") as file:
        places = {name: torch.zeros_like(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a mapping
        started = time.monotonic()
        for name, place in places.items():
            place.copy_(file.get_tensor(name))
        return time.monotonic() - started


def told(learner: subprocess.Popen[str], line: str = "") -> dict[str, Any]:
    """What the learner answers. Raises RuntimeError when it has died."""
    if learner.stdin is None or learner.stdout is None:
        raise ValueError("the learner talks through pipes")
    learner.stdin.write(line)
    learner.stdin.flush()
    answer = learner.stdout.readline()
    if not answer:
        raise RuntimeError("the learner has died")
    return dict(json.loads(answer))


def stage_directory(side: str, home: Path) -> Path:
    """Where the services have theirs."""
    return default_stage_directory(f"{side}-{os.getpid()}", home, 1 << 31, Settings().shared_memory)


def main() -> None:
    """Starts both sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".millrace/models/smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--learn", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.learn is not None:
        learn(arguments.model, arguments.dtype, arguments.learn)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; seconds, medians")
    command = [sys.executable, "-m", __spec__.name, "--model", str(arguments.model), "--dtype", arguments.dtype]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stages:
        ours, learners = (stage_directory(side, Path(home)) for side in ("rollout", "learner"))
        for directory in (ours, learners):
            stages.callback(shutil.rmtree, directory, ignore_errors=True)
        learner = subprocess.Popen(
            [*command, "--learn", learners], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stages.callback(learner.wait)
        stages.callback(learner.kill)
        asyncio.run(measure(arguments.model, arguments.dtype, arguments.versions, Stage(ours, keep=3), learner))


if __name__ == "__main__":
    main()
