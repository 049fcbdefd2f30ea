"""Bad weights: numbers that are none, tensors that do not fit, and files that lie about themselves."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.chaos.grammar.draft import Draft, Expected, Part, Parts, a_pipe
from tests.chaos.job import initial_weights

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, Any]
Header = dict[str, Any]


def _tensors(change: Callable[[Tensors, random.Random], object], expected: Expected = Expected.ENDS) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        tensors: Tensors = dict(initial_weights())
        change(tensors, rng)
        draft.write(FILE, save(tensors))
        draft.expect(expected)

    return part


def _all(value: float) -> Callable[[Tensors, random.Random], object]:
    return lambda tensors, _: tensors.update({name: np.full_like(array, value) for name, array in tensors.items()})


def _one(tensors: Tensors, rng: random.Random) -> None:
    """One number of one tensor."""
    array = tensors[rng.choice(sorted(tensors))]
    array.flat[rng.randrange(array.size)] = rng.choice((np.nan, np.inf, -np.inf))


def _missing(tensors: Tensors, rng: random.Random) -> None:
    del tensors[rng.choice(sorted(name for name in tensors if name != "lm_head.weight"))]


def _shape(tensors: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(tensors))
    shapes = ((3, 5), (1,), (), tensors[name].shape[::-1] if tensors[name].ndim > 1 else (7,), (0, 4), (2, 2, 2, 2))
    tensors[name] = np.zeros(rng.choice(shapes), np.float32)


def _type(tensors: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(tensors))
    tensors[name] = tensors[name].astype(rng.choice((np.int8, np.int64, np.bool_, np.uint16)))


def _header(change: Callable[[Header, bytes, random.Random], bytes | None]) -> Part:
    """Changes the header in place; or gives the whole file's bytes."""

    def part(draft: Draft, rng: random.Random) -> None:
        raw = save(initial_weights())
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        made = change(header, raw, rng)
        if made is None:
            text = json.dumps(header).encode()
            made = struct.pack("<Q", len(text)) + text + raw[8 + length :]
        draft.write(FILE, made)
        draft.expect(Expected.ENDS)

    return part


def _overlap(header: Header, _raw: bytes, rng: random.Random) -> None:
    first, second = rng.sample([name for name in sorted(header) if len(header[name]["shape"]) == 1], 2)
    header[second]["data_offsets"] = header[first]["data_offsets"]


def _beyond(header: Header, raw: bytes, rng: random.Random) -> None:
    name = rng.choice(sorted(header))
    begin, end = header[name]["data_offsets"]
    far = rng.choice((len(raw) * 2, 2**40, 2**63))
    header[name]["data_offsets"] = rng.choice(
        ([begin + far, end + far], [-4, end], [end, begin], [begin], ["0", "4"], None)
    )


def _length(_header: Header, raw: bytes, rng: random.Random) -> bytes:
    return struct.pack("<Q", rng.choice((2**63, 2**64 - 1, len(raw) * 10, 0, 1, 2**31))) + raw[8:]


def _odd_header(_header: Header, _raw: bytes, rng: random.Random) -> bytes:
    text = rng.choice(
        (
            b"[]",
            b"null",
            b"{",
            b"\xff" * 8,
            b"[" * 100_000,
            b'{"a": 7}',
            b'{"__metadata__": 7}',
            b" " * 99_999_999 + b"{}",
        )
    )
    return struct.pack("<Q", len(text)) + text


def _sparse(draft: Draft, rng: random.Random) -> None:
    """A file that claims to be very large, and takes no room."""
    size = rng.choice((2**33, 2**40))
    header = json.dumps(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [size // 64, 16], "data_offsets": [0, size]}}
    ).encode()
    with (draft.model() / FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    draft.expect(Expected.ENDS)


def _index(document: object) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        (draft.model() / INDEX).write_text(json.dumps(document))
        draft.expect(Expected.REFUSED)

    return part


def _pickle(draft: Draft, _: random.Random) -> None:
    (draft.model() / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    draft.expect(Expected.REFUSED)


WEIGHTS: Parts = {
    "weights: all NaN": _tensors(_all(np.nan)),
    "weights: all infinite": _tensors(_all(np.inf)),
    "weights: one that is not finite": _tensors(_one),
    "weights: too large to compute with": _tensors(_all(3e38)),
    "weights: all zero": _tensors(_all(0.0), Expected.HARMLESS),
    "weights: a tensor that is missing": _tensors(_missing),
    "weights: no tensors": _tensors(lambda tensors, _: tensors.clear()),
    "weights: tensors of nobody": _tensors(
        lambda tensors, _: tensors.update({f"extra.{n}": np.zeros(4, np.float32) for n in range(3)})
    ),
    "weights: a wrong shape": _tensors(_shape),
    "weights: a wrong type": _tensors(_type),
    "weights: other names": _tensors(
        lambda tensors, _: [tensors.update({f"transformer.{name}": tensors.pop(name)}) for name in list(tensors)]
    ),
    "weights: offsets twice": _header(_overlap),
    "weights: offsets beyond the file": _header(_beyond),
    "weights: a header that lies about its length": _header(_length),
    "weights: an odd header": _header(_odd_header),
    "weights: truncated": _header(lambda _h, raw, rng: raw[: rng.randrange(len(raw))]),
    "weights: with more behind them": _header(lambda _h, raw, _rng: raw + bytes(1000)),
    "weights: empty": _header(lambda _h, _raw, _rng: b""),
    "weights: unknown type": _header(
        lambda h, _raw, rng: h[rng.choice(sorted(h))].update(dtype=rng.choice(("F128", "X", 7, None)))
    ),
    "weights: very large and sparse": _sparse,
    "weights: an index without shards": _index({"weight_map": {}}),
    "weights: an index of files elsewhere": _index({"weight_map": {"a": "../scripted/model.safetensors"}}),
    "weights: an index of missing files": _index({"weight_map": {"a": "nope.safetensors"}}),
    "weights: an odd index": _index({"weight_map": [1, 2]}),
    "weights: a pipe": a_pipe(FILE),
    "weights: a pickle": _pickle,
}
