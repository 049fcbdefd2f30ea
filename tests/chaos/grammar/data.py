"""Bad files of tasks: too large, torn, of the wrong types, or not files at all."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.chaos.grammar.draft import Draft, Expected, Part, Parts
from tests.chaos.scripted import script

MIB = 1024**2


def row(number: int, **columns: Any) -> bytes:
    """A good line, some columns of which are others."""
    prompt = [{"role": "user", "content": script.prompt(number)}]
    task = {"prompt": prompt, "data_source": script.DATA_SOURCE, "ground_truth": script.answer(number)}
    return json.dumps(task | columns).encode()


def _good(count: int = 200) -> Iterator[bytes]:
    return (row(number) for number in range(count))


def _lines(make: Callable[[random.Random], Iterable[bytes]], expected: Expected = Expected.ENDS) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        with draft.data().open("wb") as file:
            for line in make(rng):
                file.write(line + b"\n")
        draft.expect(expected)

    return part


def _with(**columns: Any) -> Part:
    """One row has odd columns, somewhere."""

    def make(rng: random.Random) -> Iterator[bytes]:
        bad = rng.randrange(200)
        for number in range(200):
            yield row(number, **columns) if number == bad else row(number)

    return _lines(make, Expected.REFUSED)


def _deep(depth: int) -> bytes:
    return row(0)[:-1] + b', "extra_info": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


def _long_line(rng: random.Random) -> Iterator[bytes]:
    yield row(0, extra_info={"x": "x" * rng.choice((100, 300)) * MIB})


def _long_prompts(rng: random.Random) -> Iterator[bytes]:
    for number in range(20):
        yield row(number, prompt=f"row {number} " + "x" * rng.choice((MIB, 4 * MIB)))


def _too_long_prompts(_: random.Random) -> Iterator[bytes]:
    """Each fits its file well, and none fits the model."""
    return (row(number, prompt="x" * 10_000 + f" row {number}") for number in range(500))


def _late(rng: random.Random) -> Iterator[bytes]:
    """A bad row far behind good ones."""
    yield from _good(60_000)
    yield rng.choice((b"{", b"[]", row(0, prompt=7), b"\xff"))


def _parquet(columns: Callable[[random.Random], dict[str, Any]], expected: Expected = Expected.ENDS) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        pq.write_table(pa.table(columns(rng)), draft.data(".parquet"), compression="zstd")
        draft.expect(expected)

    return part


def _repeated(prompt: str, count: int) -> dict[str, Any]:
    """The same row again and again: small on the disk."""
    values = {"prompt": prompt, "ground_truth": "1", "data_source": script.DATA_SOURCE}
    indices = pa.array(np.zeros(count, np.int32))
    return {name: pa.DictionaryArray.from_arrays(indices, pa.array([value])) for name, value in values.items()}


def _bomb(rng: random.Random) -> dict[str, Any]:
    """Many GB when it is read."""
    return _repeated("row 7 " + "x" * MIB, rng.choice((2_000, 6_000)))


def _cut_parquet(draft: Draft, rng: random.Random) -> None:
    path = draft.data(".parquet")
    pq.write_table(pa.table({"prompt": ["row 1"] * 500, "ground_truth": ["1"] * 500, "data_source": ["x"] * 500}), path)
    raw = path.read_bytes()
    spoiled = bytearray(raw)
    for _ in range(rng.randrange(1, 40)):
        spoiled[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(
        rng.choice(
            (
                raw[: len(raw) // 2],
                b"PAR1" + bytes(100) + b"PAR1",
                bytes(spoiled),
                b"",
                raw[:-8] + b"\xff\xff\xff\x7fPAR1",
            )
        )
    )


def _special(kind: str, suffix: str = ".jsonl") -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        path = draft.data(suffix)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "sparse":
            with path.open("wb") as file:
                file.truncate(2**40)
        else:
            path.symlink_to(kind)
        draft.expect(Expected.REFUSED)

    return part


def _elsewhere(draft: Draft, rng: random.Random) -> None:
    sources = (
        "../../../etc/passwd.jsonl",
        "/etc/hostname.jsonl",
        "nope.jsonl",
        "/dev/zero.parquet",
        "\0.jsonl",
        "x" * 900 + ".jsonl",
        ".jsonl",
        "models/../data.jsonl",
    )
    draft.set("data.train", {"source": rng.choice(sources)})
    draft.expect(Expected.REFUSED)


DATA: Parts = {
    "data: a line of 100 MB": _lines(_long_line),
    "data: prompts of 1 MB": _lines(_long_prompts),
    "data: prompts too long for the model": _lines(_too_long_prompts),
    "data: no rows": _lines(lambda _: [], Expected.REFUSED),
    "data: only empty lines": _lines(lambda _: [b""] * 10_000, Expected.REFUSED),
    "data: not UTF-8": _lines(lambda rng: [row(0), rng.randbytes(300).replace(b"\n", b"")], Expected.REFUSED),
    "data: deep JSON": _lines(lambda rng: [_deep(rng.choice((100, 5_000, 1_000_000)))], Expected.HARMLESS),
    "data: a bad row far behind": _lines(_late, Expected.ENDS),
    "data: a NaN as ground truth": _with(ground_truth=float("nan")),
    "data: no ground truth": _with(ground_truth=None),
    "data: an object as ground truth": _with(ground_truth={"a": 1}),
    "data: a prompt of a wrong type": _with(prompt=7),
    "data: an empty prompt": _with(prompt=""),
    "data: messages of a wrong type": _with(prompt=[{"role": "user", "content": 7}]),
    "data: an unknown role": _with(prompt=[{"role": "root", "content": "x"}]),
    "data: half a letter": _with(prompt="\ud800"),
    "data: extra_info of a wrong type": _with(extra_info=[1]),
    "data: data_source of a wrong type": _with(data_source=[1]),
    "data: an endless number": _lines(
        lambda _: [row(0)[:-1] + b', "extra_info": {"n": ' + b"9" * 5_000_000 + b"}}"], Expected.HARMLESS
    ),
    "data: a data_source without a verifier": _lines(
        lambda _: [row(n, data_source="nobody/knows") for n in range(50)], Expected.REFUSED
    ),
    "data: a thousand data_sources": _lines(
        lambda _: [row(n, data_source=f"nobody/{n}") for n in range(1000)], Expected.REFUSED
    ),
    "data: a ground truth of 10 MB": _lines(lambda _: [row(n, ground_truth="9" * 10 * MIB) for n in range(8)]),
    "data: answers that are never right": _lines(
        lambda _: [row(n, ground_truth="77") for n in range(200)], Expected.HARMLESS
    ),
    "data: parquet bomb": _parquet(_bomb),
    "data: millions of rows": _parquet(lambda _: _repeated("row 7", 5_000_000), Expected.HARMLESS),
    "data: parquet of other columns": _parquet(lambda _: {"a": [1, 2], "b": ["x", "y"]}, Expected.REFUSED),
    "data: parquet of other types": _parquet(
        lambda rng: {
            "prompt": pa.array(rng.choice(([1, 2], [b"\xff", b"x"], [[1], [2]], [True, False]))),
            "ground_truth": ["1", "2"],
            "data_source": ["x", "y"],
        },
        Expected.REFUSED,
    ),
    "data: parquet without rows": _parquet(
        lambda _: {"prompt": pa.array([], pa.string()), "ground_truth": pa.array([], pa.string())}, Expected.REFUSED
    ),
    "data: torn parquet": _cut_parquet,
    "data: a pipe": _special("pipe"),
    "data: a parquet pipe": _special("pipe", ".parquet"),
    "data: a directory": _special("directory"),
    "data: a sparse file of 1 TB": _special("sparse"),
    "data: a sparse parquet of 1 TB": _special("sparse", ".parquet"),
    "data: a link to /dev/zero": _special("/dev/zero"),
    "data: a link elsewhere": _special("/etc/passwd"),
    "data: elsewhere": _elsewhere,
}
