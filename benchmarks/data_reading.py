"""What reading a large parquet file costs the learner: memory, time to open it, tasks a second in the order at random.

    python -m benchmarks.data_reading FOLDER [--gigabytes 2.2] [--group-rows 200000] [--seconds 60]

The file is made in FOLDER unless it is there already; each task's ground truth is its index, which is checked for every draw.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.machine import describe_machine
from services.common.config.settings import Settings
from services.common.spec.job import JobSpec
from services.learner.groups.sources import Sources, unpack

NAME = "tasks.parquet"
SEED = 3
PREFETCHED = 64
PREFETCH_S = 0.25


def make_file(path: Path, size: int, group_rows: int) -> None:
    """Writes rows of about 850 bytes, uncompressed, until the file has so many bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    words = ["".join(random.Random(n).choices("abcdefghijklmnop", k=7)) for n in range(5000)]  # noqa: S311
    texts = [" ".join(random.Random(n).choices(words, k=100)) for n in range(2000)]  # noqa: S311
    text, first = pa.string(), 0
    schema = pa.schema([("prompt", text), ("data_source", text), ("ground_truth", text)])
    with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while path.stat().st_size < size:
            rows = range(first, first + group_rows)
            prompts = [f"{n} {texts[n % len(texts)]}" for n in rows]
            columns: dict[str, Any] = {"prompt": prompts, "data_source": ["s"] * group_rows}
            columns["ground_truth"] = [str(n) for n in rows]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=group_rows)
            first += group_rows


def peak_mib() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_file(folder: Path, seconds: float) -> None:
    """Opens the file as the learner's child does, draws tasks, and prints the figures."""
    data = {"train": {"source": NAME}, "seed": SEED}
    spec = JobSpec.model_validate({"model": {"path": "any"}, "data": data})
    begun, before = time.monotonic(), peak_mib()
    sources = Sources(spec.model_dump_json(), Settings(home=folder, data_roots=[folder]).public(), 10.0)
    tasks = sources.open_train()["tasks"]
    print(f"open: {time.monotonic() - begun:.1f} s, {tasks} tasks, {peak_mib():.0f} MiB at most ({before:.0f} before)")
    begun = time.monotonic()
    sources.index(0)
    print(f"order of an epoch: {time.monotonic() - begun:.1f} s, {peak_mib():.0f} MiB at most")
    begun, done, slowest = time.monotonic(), 0, 0.0
    while time.monotonic() - begun < seconds:
        asked = time.monotonic()
        made = sources.training(list(range(done, done + PREFETCHED)), PREFETCH_S)
        slowest = max(slowest, time.monotonic() - asked)
        for offset, (index, payload, reason) in enumerate(made):
            if payload is None or index != sources.index(done + offset) or unpack(payload).ground_truth != str(index):
                raise SystemExit(f"draw {done + offset} is wrong: index {index}, {reason}")
        done += len(made)
    speed = done / (time.monotonic() - begun)
    print(f"draws: {done} in order, {speed:.0f} tasks/s, slowest request {slowest:.2f} s, {peak_mib():.0f} MiB at most")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--group-rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    path = options.folder / NAME
    if not path.exists():
        make_file(path, int(options.gigabytes * 1e9), options.group_rows)
        print(f"made {path}: run this again, so that making it does not count")
        return
    print(f"{describe_machine()}\n{path.stat().st_size / 1e9:.2f} GB")
    read_file(options.folder, options.seconds)


if __name__ == "__main__":
    main()
