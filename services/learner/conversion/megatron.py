"""Megatron checkpoint of a Hugging Face directory: `millrace weights to-megatron`.

safetensors ─► whole parameters ─► parts of each rank ─► ranks' files, config and tokenizer, manifest

It holds weights only: a job whose `checkpoint.load` names it begins at step 0, in whatever layout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.common.checkpoints.fingerprint import text_digest, weight_digest
from services.common.checkpoints.manifest import MANIFEST, WrittenFile, dump_manifest, manifest_document
from services.common.checkpoints.origin import WEIGHTS_ONLY
from services.common.durable import write_durably
from services.common.models.directory import inspect_model
from services.common.models.roles import naming
from services.common.models.trial import check_model as try_model
from services.common.models.weight_files import StoredTensor, read_headers
from services.learner.conversion.hugging_face import CONFIG_DIR
from services.learner.conversion.request import Conversion, Converted, RoleName, TensorType
from services.learner.conversion.skeleton import EMBEDDING, OUTPUT_LAYER, Skeleton
from services.learner.megatron.bridges import check_model, read_config
from services.learner.megatron.parts import split_parts
from services.learner.training.directory import copy_texts
from services.learner.training.layout import Layout
from services.learner.training.rank_file import FORMAT, rank_file
from services.learner.training.tensor_file import write_tensors

CHECK_S = 600.0
"""Longest check of the weights' values; headers are checked whole."""


def to_megatron(request: Conversion, folder: Path) -> Converted:
    """Writes the checkpoint. `folder` exists, and is empty.

    Raises:
        ModelError: the directory is not a model that can be trained, or its sizes do not divide; names file, key and size.
    """
    source = Path(request.source)
    with naming("MODEL"):
        facts = try_model(str(source), time.monotonic() + CHECK_S)
        headers = read_headers(source)
    dtype = request.dtype or _dtype_of(headers.values())
    sizes = Layout(0, request.tensor_parallel_size, 0, request.pipeline_parallel_size, 0, 1, 0)
    check_model(read_config(source), source, sizes)
    skeleton = Skeleton.of(source, getattr(torch, dtype))
    layout = {**sizes.sizes, "use_distributed_optimizer": False}
    about: dict[str, Any] = {
        "format": FORMAT, "step": 0, "layout": {**layout, "dtype": dtype.value}, "counters": {}, "places": {}, "kl_coefficient": None,
    }  # fmt: skip
    files = copy_texts(source, folder, CONFIG_DIR)
    with ExitStack() as stack:
        model = _Source(headers, skeleton, stack)
        for stage in range(sizes.pp_size):
            for tp_rank in range(sizes.tp_size):
                name = rank_file(stage * sizes.tp_size + tp_rank)
                weights = dict(model.parts(stage, tp_rank, sizes))
                files.append(write_tensors(folder, name, weights, {"about": json.dumps(about)}))
    identity = {
        "job_id": "",
        "spec": {"learner": layout, "model": {"path": str(source), "dtype": dtype.value}},
        "dataset": "",
        "tokenizer": text_digest(source),
        "weights": weight_digest(source),
        "shape": inspect_model(source).described(),
    }
    _write_manifest(folder, {"identity": identity, WEIGHTS_ONLY: True}, files)
    return Converted(
        path=request.out,
        role=RoleName.ACTOR,
        architecture=facts["shape"]["architecture"],
        dtype=dtype.value,
        tensors=facts["tensors"],
        parameters=facts["parameters"],
        bytes=sum(file.bytes for file in files),
        step=0,
    )


class _Source:
    """The weights of a Hugging Face directory, as parts of ranks."""

    def __init__(self, headers: dict[str, StoredTensor], skeleton: Skeleton, stack: ExitStack) -> None:
        """Opens the files until the stack is closed."""
        self._headers, self._skeleton = headers, skeleton
        paths = {tensor.file for tensor in headers.values()}
        self._files = {path: stack.enter_context(safe_open(path, framework="pt", device="cpu")) for path in paths}

    def parts(self, stage: int, tp_rank: int, sizes: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Name in the rank's file, and this rank's part, of every parameter of the stage."""
        for name in self._skeleton.names():
            if (local := self._local_name(name, stage, sizes)) is not None:
                yield f"model.{local}", self._part(name, tp_rank, sizes)
        if self._skeleton.tied and sizes.pp_size > 1 and stage == sizes.pp_size - 1:
            yield f"model.{OUTPUT_LAYER}", self._part(EMBEDDING, tp_rank, sizes)

    def _part(self, name: str, tp_rank: int, sizes: Layout) -> torch.Tensor:
        tensors = [self._tensor(source) for source in self._skeleton.hugging_face_names(name)]
        whole = self._skeleton.to_megatron(name, tensors)
        parts = split_parts(self._skeleton.bridge, name, whole, self._skeleton.parameter(name), sizes.tp_size)
        return parts[tp_rank].clone(memory_format=torch.contiguous_format)  # a view would keep the whole in memory

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._headers[name].file].get_tensor(name)
        return tensor

    def _local_name(self, name: str, stage: int, sizes: Layout) -> str | None:
        """The name in the files of the stage, which counts its layers from 0; None if it is in those of another."""
        if not name.startswith("decoder.layers."):
            home = 0 if name == EMBEDDING else sizes.pp_size - 1
            return name if stage == home else None
        layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
        per_stage = self._skeleton.layers // sizes.pp_size
        home, local = divmod(int(layer), per_stage)
        return f"decoder.layers.{local}.{rest}" if stage == home else None


def _dtype_of(tensors: Iterable[StoredTensor]) -> TensorType:
    """The type that holds every value of the files exactly."""
    return TensorType.BFLOAT16 if {tensor.dtype for tensor in tensors} == {"BF16"} else TensorType.FLOAT32


def _write_manifest(folder: Path, state: dict[str, Any], files: list[WrittenFile]) -> None:
    document = manifest_document(0, state, sorted(files, key=lambda file: file.name))
    write_durably(folder / MANIFEST, dump_manifest(document))
