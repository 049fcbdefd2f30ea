"""Weight files: the safetensors files of a model directory, checked within bounds and without torch.

The safetensors library checks the headers (lengths, offsets, holes, overlaps). Values are checked as bit patterns: a number is not finite
when every bit of its exponent is set.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from services.common.models.directory import INDEX, ON_MEGATRON, SINGLE, ModelInfo, read_json, reject
from services.common.spec.rollout import DType

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
"""Files of tied models leave it out, but engines keep a packed copy of it that would become stale."""
BUFFERS = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that old files contain and training ignores."""
MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_MISFITS = 5
"""Tensors that one message names."""
_FIRST_BYTES = 256 * 1024
_CHUNK_BYTES = 8 * 1024 * 1024
_LENGTH_BYTES = 8
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
"""Element type → (integer type of its bits, mask of its exponent)."""


def weight_bytes(model_dir: Path) -> int:
    """Size of a model's safetensors files."""
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


def version_bytes(model_dir: Path, dtype: DType) -> int:
    """Most bytes of one policy version: the files may have 2 bytes an element where the version has 4."""
    return weight_bytes(model_dir) * (2 if dtype is DType.FLOAT32 else 1)


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
    """Of its values, bytes from the beginning of the file."""
    bytes: int


@dataclass(frozen=True, slots=True)
class ValueScan:
    """Extent of a check of values."""

    tensors: int
    parameters: int
    bytes: int
    """Of the values that were checked."""
    of_bytes: int

    @property
    def all(self) -> bool:
        """Whether every value was checked."""
        return self.bytes == self.of_bytes


def check_weights(folder: Path, info: ModelInfo, config: Mapping[str, Any], until: float) -> ValueScan:
    """Checks headers, names, shapes and, until `until` (monotonic seconds), values. Raises ModelError."""
    tensors = read_headers(folder)
    check_tensors(folder, tensors, info, config)
    return check_values(tensors.values(), until)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model by name, without buffers of old files.

    Raises:
        ModelError: a file is unreadable or its header is wrong, an element type is not a float of 16 or 32 bits, a tensor is there twice,
            or index and files differ; names the file.
    """
    index = folder / INDEX
    placed = read_json(index).get("weight_map") if index.is_file() else None
    names = {str(name) for name in placed.values()} if isinstance(placed, dict) else {SINGLE}
    if placed is None:
        for other in sorted(folder.glob("*.safetensors")):
            if other.name != SINGLE:
                reject(other, f"lies beside {SINGLE} without an index ({INDEX}) that says what is where")
    found: dict[str, StoredTensor] = {}
    for name in sorted(names):
        for tensor in _read_header(folder / name):
            if tensor.name in found:
                reject(tensor.file, f"{tensor.name} is in {found[tensor.name].file.name} too")
            found[tensor.name] = tensor
    if isinstance(placed, dict):
        _check_index(index, placed, found)
    return {name: tensor for name, tensor in found.items() if not name.endswith(BUFFERS)}


def check_tensors(
    folder: Path, tensors: Mapping[str, StoredTensor], info: ModelInfo, config: Mapping[str, Any]
) -> None:
    """Checks that these are the architecture's tensors, in config.json's shapes. Raises ModelError with misfits.

    Of an architecture that is not known here only its back end knows them, which names misfits when it loads them.
    """
    if info.architecture not in ON_MEGATRON:
        return
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
        unknown = sorted(tensors.keys() - expected.keys() - {LM_HEAD})
        misfits += [f"{name} is none of {info.architecture}'s" for name in unknown]
    if misfits:
        more = "; and others" if len(misfits) > MAX_MISFITS else ""
        reject(folder / (INDEX if (folder / INDEX).is_file() else SINGLE), "; ".join(misfits[:MAX_MISFITS]) + more)


def needed_tensors(info: ModelInfo, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a model, layer by layer."""
    hidden, width = info.hidden_size, info.intermediate_size
    head = config.get("head_dim") or hidden // info.num_attention_heads
    query, key = info.num_attention_heads * head, info.num_key_value_heads * head
    qwen2 = info.architecture == "Qwen2ForCausalLM"
    qwen3 = info.architecture in {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
    biased = not qwen2 and bool(config.get("attention_bias"))
    yield EMBEDDING, (info.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not info.tie_word_embeddings:
        yield LM_HEAD, (info.vocab_size, hidden)
    for layer in range(info.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
            if qwen2 or biased:
                yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
        if biased:
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
        if qwen3:
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
        if info.num_experts:
            yield from _expert_tensors(prefix, info)
            continue
        for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            yield f"{prefix}.mlp.{name}_proj.weight", shape
            if info.architecture == "LlamaForCausalLM" and config.get("mlp_bias"):
                yield f"{prefix}.mlp.{name}_proj.bias", shape[:1]


def _expert_tensors(prefix: str, info: ModelInfo) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Router and experts of a layer."""
    hidden, width = info.hidden_size, info.expert_intermediate_size
    mixtral = info.architecture == "MixtralForCausalLM"
    block, names = (
        ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    yield f"{prefix}.{block}.gate.weight", (info.num_experts, hidden)
    for expert in range(info.num_experts):
        for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            yield f"{prefix}.{block}.experts.{expert}.{name}.weight", shape


def check_values(tensors: Iterable[StoredTensor], until: float) -> ValueScan:
    """Searches for values that are not finite: first at the beginning of every tensor, then in the rest, until `until`, monotonic seconds.

    Raises:
        ModelError: a value is not finite; names file, tensor and index.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))
    first = ((tensor, 0, min(_FIRST_BYTES, tensor.bytes)) for tensor in ordered)
    rest = (
        (tensor, start, min(_CHUNK_BYTES, tensor.bytes - start))
        for tensor in ordered
        for start in range(_FIRST_BYTES, tensor.bytes, _CHUNK_BYTES)
    )
    checked = 0
    for tensor, start, size in chain(first, rest):
        if time.monotonic() > until:
            break
        _check_piece(tensor, start, size)
        checked += size
    parameters = sum(math.prod(tensor.shape) for tensor in ordered)
    return ValueScan(len(ordered), parameters, checked, sum(tensor.bytes for tensor in ordered))


def _check_piece(tensor: StoredTensor, start: int, size: int) -> None:
    bits, exponent = _EXPONENTS[tensor.dtype]
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.start + start)
            data = file.read(size)
    except OSError as error:
        reject(tensor.file, f"cannot be read: {error.strerror}", error)
    if len(data) != size:
        reject(tensor.file, f"has become shorter: {tensor.name} is cut off")
    values = np.frombuffer(data, np.dtype(bits).newbyteorder("<"))
    bad = (values & exponent) == exponent
    if bad.any():
        offset = start // values.itemsize + int(bad.argmax())
        index = [int(part) for part in np.unravel_index(offset, tensor.shape)] if tensor.shape else []
        reject(tensor.file, f"{tensor.name} has a value that is not finite, at {index}")


def _read_header(path: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                reject(path, f"says that its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
            with safe_open(path, framework="numpy"):  # checks lengths and offsets, reads no values
                header = json.loads(file.read(length), object_pairs_hook=_unique)
    except OSError as error:
        reject(path, f"cannot be read: {error.strerror or error}", error)
    except (SafetensorError, ValueError, RecursionError) as error:
        reject(path, f"is no safetensors file: {error}", error)
    header.pop("__metadata__", None)
    return [_stored(path, name, entry, _LENGTH_BYTES + length) for name, entry in header.items()]


def _stored(path: Path, name: str, entry: dict[str, Any], offset: int) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    if dtype not in _EXPONENTS:
        reject(path, f"{name} is of type {dtype}; weights must be one of {', '.join(_EXPONENTS)}")
    start, end = (int(place) for place in entry["data_offsets"])
    if not math.prod(shape):
        reject(path, f"{name} has no values: its shape is {list(shape)}")
    return StoredTensor(name, path, dtype, shape, offset + start, end - start)


def _check_index(index: Path, placed: Mapping[str, object], found: Mapping[str, StoredTensor]) -> None:
    for name in sorted(placed.keys() | found.keys()):
        if name not in found:
            reject(index, f"places {name} in {placed[name]}, which does not have it")
        if placed.get(name) != found[name].file.name:
            reject(index, f"does not place {name} in {found[name].file.name}, which has it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in its header twice")
    return found
