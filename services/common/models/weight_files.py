"""Weight files: what the safetensors files of a model directory hold, looked at within bounds and without torch.

The headers are checked by the safetensors library itself (lengths, offsets, holes, overlaps). Values are looked at as bit patterns: a
number is not finite when every bit of its exponent is set.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from services.common.errors import ModelError
from services.common.models.directory import FIELD, ModelInfo, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LM_HEAD = "lm_head.weight"
BUFFERS = ("rotary_emb.inv_freq",)
"""Endings of what old files carry and nobody trains."""

MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_MISFITS = 5
"""Tensors that one message names."""
_HEAD_BYTES = 256 * 1024
_CHUNK_BYTES = 8 * 1024 * 1024
_LENGTH_BYTES = 8

_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
"""Element types that are read here → (its bits as an integer, mask of its exponent)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file.

    Example: StoredTensor("model.norm.weight", Path("…/model.safetensors"), "BF16", (576,), start=1048, bytes=1152)
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its values, from the beginning of the file."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Looked:
    """How much of the values was looked at."""

    tensors: int
    parameters: int
    bytes: int
    of_bytes: int

    @property
    def all(self) -> bool:
        """Whether every value was."""
        return self.bytes == self.of_bytes


def check_weights(folder: Path, info: ModelInfo, config: Mapping[str, Any], until: float) -> Looked:
    """Checks headers, names, shapes and, as far as the time allows, values of a model's weights.

    Args:
        folder: of the model.
        info: its sizes.
        config: what its config.json holds.
        until: when to stop looking at values, monotonic seconds.

    Raises:
        ModelError: names the file and the tensor.
    """
    tensors = read_headers(folder)
    check_tensors(folder, tensors, info, config)
    return check_values(tensors.values(), until)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model by name, old files' buffers left out.

    Raises:
        ModelError: a file cannot be read or lies about itself, an element type is not a float of 16 or 32 bits, a tensor is there twice, or
            index and files disagree; names the file.
    """
    index = folder / INDEX
    placed = read_json(index).get("weight_map") if index.is_file() else None
    names = {str(name) for name in placed.values()} if isinstance(placed, dict) else {SINGLE}
    if placed is None:
        for other in sorted(folder.glob("*.safetensors")):
            if other.name != SINGLE:
                _wrong(other, f"lies beside {SINGLE} without an index ({INDEX}) that says what is where")
    found: dict[str, StoredTensor] = {}
    for name in sorted(names):
        for tensor in _read_header(folder / name):
            if tensor.name in found:
                _wrong(tensor.file, f"{tensor.name} is in {found[tensor.name].file.name} too")
            found[tensor.name] = tensor
    if isinstance(placed, dict):
        _check_index(index, placed, found)
    return {name: tensor for name, tensor in found.items() if not name.endswith(BUFFERS)}


def check_tensors(
    folder: Path, tensors: Mapping[str, StoredTensor], info: ModelInfo, config: Mapping[str, Any]
) -> None:
    """Checks that the tensors are those of the architecture, of the shapes that its config.json says.

    Raises:
        ModelError: names the first few that are missing, have another shape or are not the model's.
    """
    expected: dict[str, tuple[int, ...]] = {}
    misfits: list[str] = []
    for name, shape in needed_tensors(info, config):
        expected[name] = shape
        tensor = tensors.get(name)
        if tensor is None:
            misfits.append(f"{name} is missing")
        elif tensor.shape != shape:
            misfits.append(f"{name} is {list(tensor.shape)}, and config.json makes it {list(shape)}")
        if len(misfits) > MAX_MISFITS:  # a config.json may name any number of layers
            break
    else:
        head = tensors.get(LM_HEAD)
        if info.tie_word_embeddings and head is not None and head.shape != (info.vocab_size, info.hidden_size):
            misfits.append(f"{LM_HEAD} is {list(head.shape)}, and config.json ties it to the embedding")
        misfits += [
            f"{name} is none of {info.architecture}'s" for name in sorted(tensors.keys() - expected.keys() - {LM_HEAD})
        ]
    if misfits:
        more = "; and others" if len(misfits) > MAX_MISFITS else ""
        _wrong(folder / (INDEX if (folder / INDEX).is_file() else SINGLE), "; ".join(misfits[:MAX_MISFITS]) + more)


def needed_tensors(info: ModelInfo, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a model of these sizes has, layer by layer."""
    hidden, wide = info.hidden_size, info.intermediate_size
    head = config.get("head_dim") or hidden // info.num_attention_heads
    query, key = info.num_attention_heads * head, info.num_key_value_heads * head
    qwen2, qwen3 = info.architecture == "Qwen2ForCausalLM", info.architecture == "Qwen3ForCausalLM"
    biased = not qwen2 and bool(config.get("attention_bias"))
    yield "model.embed_tokens.weight", (info.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not info.tie_word_embeddings:
        yield LM_HEAD, (info.vocab_size, hidden)
    for layer in range(info.num_layers):
        of = f"model.layers.{layer}"
        yield f"{of}.input_layernorm.weight", (hidden,)
        yield f"{of}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{of}.self_attn.{name}_proj.weight", (rows, hidden)
            if qwen2 or biased:
                yield f"{of}.self_attn.{name}_proj.bias", (rows,)
        yield f"{of}.self_attn.o_proj.weight", (hidden, query)
        if biased:
            yield f"{of}.self_attn.o_proj.bias", (hidden,)
        if qwen3:
            yield f"{of}.self_attn.q_norm.weight", (head,)
            yield f"{of}.self_attn.k_norm.weight", (head,)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            yield f"{of}.mlp.{name}_proj.weight", shape
            if info.architecture == "LlamaForCausalLM" and config.get("mlp_bias"):
                yield f"{of}.mlp.{name}_proj.bias", shape[:1]


def check_values(tensors: Iterable[StoredTensor], until: float) -> Looked:
    """Looks for values that are not finite: first at the beginning of every tensor, then at the rest, as far as the time allows.

    Args:
        tensors: whose values.
        until: when to stop, monotonic seconds.

    Raises:
        ModelError: there is one; names file, tensor and place.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))
    looked, total = 0, sum(tensor.bytes for tensor in ordered)
    parameters = sum(math.prod(tensor.shape) for tensor in ordered)
    for whole in (False, True):
        for tensor in ordered:
            for start, size in _pieces(tensor, whole=whole):
                if time.monotonic() > until:
                    return Looked(len(ordered), parameters, looked, total)
                _check_piece(tensor, start, size)
                looked += size
    return Looked(len(ordered), parameters, looked, total)


def _pieces(tensor: StoredTensor, *, whole: bool) -> Iterator[tuple[int, int]]:
    """(start within the tensor, size) of its head, or of all that follows it, bytes."""
    if not whole:
        yield 0, min(_HEAD_BYTES, tensor.bytes)
        return
    for start in range(_HEAD_BYTES, tensor.bytes, _CHUNK_BYTES):
        yield start, min(_CHUNK_BYTES, tensor.bytes - start)


def _check_piece(tensor: StoredTensor, start: int, size: int) -> None:
    bits, exponent = _EXPONENTS[tensor.dtype]
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.start + start)
            data = file.read(size)
    except OSError as error:
        _wrong(tensor.file, f"cannot be read: {error.strerror}")
    if len(data) != size:
        _wrong(tensor.file, f"has become shorter: {tensor.name} is cut off")
    values = np.frombuffer(data, np.dtype(bits).newbyteorder("<"))
    strange = (values & exponent) == exponent
    if strange.any():
        at = start // values.itemsize + int(strange.argmax())
        place = [int(index) for index in np.unravel_index(at, tensor.shape)] if tensor.shape else []
        _wrong(tensor.file, f"{tensor.name} has a value that is not finite, at {place}")


def _read_header(path: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                _wrong(path, f"says that its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
            with safe_open(path, framework="numpy"):  # checks lengths and offsets, reads no values
                header = json.loads(file.read(length), object_pairs_hook=_unique)
    except OSError as error:
        _wrong(path, f"cannot be read: {error.strerror or error}")
    except (SafetensorError, ValueError, RecursionError) as error:
        _wrong(path, f"is no safetensors file: {error}")
    header.pop("__metadata__", None)
    return [_stored(path, name, entry, _LENGTH_BYTES + length) for name, entry in header.items()]


def _stored(path: Path, name: str, entry: dict[str, Any], offset: int) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    if dtype not in _EXPONENTS:
        _wrong(path, f"{name} is of type {dtype}; weights must be one of {', '.join(_EXPONENTS)}")
    start, end = (int(place) for place in entry["data_offsets"])
    if not math.prod(shape):
        _wrong(path, f"{name} has no values: its shape is {list(shape)}")
    return StoredTensor(name, path, dtype, shape, offset + start, end - start)


def _check_index(index: Path, placed: Mapping[str, object], found: Mapping[str, StoredTensor]) -> None:
    for name in sorted(placed.keys() | found.keys()):
        if name not in found:
            _wrong(index, f"places {name} in {placed[name]}, which does not have it")
        if placed.get(name) != found[name].file.name:
            _wrong(index, f"does not place {name} in {found[name].file.name}, which has it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in its header twice")
    return found


def _wrong(path: Path, what: str) -> NoReturn:
    raise ModelError(f"{path}: {what}", field=FIELD)
