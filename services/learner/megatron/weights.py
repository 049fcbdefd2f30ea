"""Weights of the policy under their Hugging Face names: gathered over TP and PP on rank 0, and written as a directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from megatron.core import parallel_state
from safetensors import safe_open

from services.common.checkpoints.manifest import WrittenFile
from services.common.durable import write_durably
from services.common.models.directory import INDEX
from services.common.models.weight_files import EMBEDDING, LM_HEAD
from services.common.weights.dtypes import TORCH
from services.learner.megatron.collectives import gather_json
from services.learner.megatron.model import ModelPart
from services.learner.megatron.parallel import Layout
from services.learner.megatron.tensor_file import Weights, write_tensors

CHAT_TEMPLATE = "chat_template.jinja"
"""File that transformers takes a template from, before all others."""
_INDEX_SUFFIX = INDEX.removeprefix("model")
_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of the files that are copied with the weights: config, tokenizer, chat template. No code, no other weights."""


class Exporter:
    """Gathers the weights; every rank calls `gather` at the same time."""

    def __init__(self, policy: ModelPart, layout: Layout, device: torch.device) -> None:
        """Gathers the names and shapes of every stage's weights on every rank."""
        self._policy, self._layout, self._device = policy, layout, device
        names = policy.bridge._weight_name_mapping_mcore_local_to_global(policy.chunk)  # noqa: SLF001
        self._parameters = [
            (names[name], parameter)
            for name, parameter in policy.chunk.named_parameters()
            # with tied embeddings the last stage keeps a second copy of the first one's
            if not (policy.tied and name == "output_layer.weight")
        ]
        sends = layout.tp_rank == 0 and layout.is_first_replica
        mine = [[name, list(self._whole_shape(p))] for name, p in self._parameters] if sends else []
        self._senders: list[list[tuple[str, list[int]]]] = gather_json(mine, device)

    def gather(self, dtype: torch.dtype | None, *, copy: bool = True) -> Weights | None:
        """The weights on rank 0; None on the other ranks. Without `copy` some are the parameters themselves, on a CPU.

        `dtype` None keeps that of the parameters; a cast to it is the only change to a weight. `lm_head.weight` is always included:
        otherwise an engine that packs its output layer would keep sampling with a stale one.
        """
        if not self._layout.is_first_replica:
            return None
        merged = self._merged(dtype)
        if self._layout.rank != 0:
            for _, tensor in merged:
                if self._layout.tp_rank == 0:
                    dist.send(tensor.contiguous(), dst=0)
            return None
        weights: Weights = {}
        for rank, entries in enumerate(self._senders):
            if rank == 0:
                for name, tensor in merged:
                    self._add(weights, name, tensor, copy=copy)
                continue
            for name, shape in entries:
                tensor = torch.empty(shape, dtype=dtype or self._policy.bridge.dtype, device=self._device)
                dist.recv(tensor, src=rank)
                self._add(weights, name, tensor, copy=False)
        if self._policy.tied:
            weights[LM_HEAD] = weights[EMBEDDING].clone() if copy else weights[EMBEDDING]
        return weights

    def _add(self, weights: Weights, name: str, tensor: torch.Tensor, *, copy: bool) -> None:
        for hf_name, value in zip(*self._policy.bridge._weight_to_hf_format(name, tensor), strict=True):  # noqa: SLF001
            weights[hf_name] = value.detach().to("cpu", copy=copy).contiguous()

    def _merged(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """This stage's parameters, merged over its tensor-parallel ranks."""
        group = parallel_state.get_tensor_model_parallel_group()
        for name, parameter in self._parameters:
            shard = parameter.detach() if dtype is None else parameter.detach().to(dtype)
            if self._layout.tp_size == 1 or not parameter.tensor_model_parallel:
                yield name, shard
                continue
            shards = [torch.empty_like(shard) for _ in range(self._layout.tp_size)]
            dist.all_gather(shards, shard.contiguous(), group=group)
            yield name, self._policy.bridge._weight_merge_across_tp(name, shards, parameter)  # noqa: SLF001

    def _whole_shape(self, parameter: torch.Tensor) -> torch.Size:
        if self._layout.tp_size == 1 or not parameter.tensor_model_parallel:  # type: ignore[attr-defined]
            return parameter.shape
        shape = list(parameter.shape)
        shape[parameter.partition_dim] *= self._layout.tp_size  # type: ignore[attr-defined]
        return torch.Size(shape)


def source_dtypes(model_dir: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in the directory's safetensors files, from their headers."""
    dtypes: dict[str, torch.dtype] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            dtypes |= {name: getattr(torch, TORCH[file.get_slice(name).get_dtype()]) for name in file.keys()}  # noqa: SIM118
    return dtypes


def write_directory(
    weights: Weights, source: Path, root: Path, folder: str, chat_template: str | None = None
) -> list[WrittenFile]:
    """Writes the Hugging Face directory `root/folder`, durably: the tensors that the source has, in its dtypes, config and tokenizer.

    `chat_template`: in place of the source's.
    """
    written = copy_texts(source, root, folder, chat_template)
    tensors = {n: weights[n].to(dtype).contiguous() for n, dtype in source_dtypes(source).items() if n in weights}
    return written + write_shards(tensors, lambda names: {name: tensors[name] for name in names}, root, folder)


def copy_texts(source: Path, root: Path, folder: str, chat_template: str | None = None) -> list[WrittenFile]:
    """Copies a model's config, tokenizer and chat template, or this one in its place, to `root/folder`, durably."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    texts = {
        path.name: path.read_bytes()
        for path in sorted(source.iterdir())
        if path.suffix in _COPIED and path.is_file() and not path.name.endswith(_INDEX_SUFFIX)
    }
    if chat_template is not None:
        texts[CHAT_TEMPLATE] = chat_template.encode()
    return [write_file(root, f"{folder}/{name}", data) for name, data in texts.items()]


def write_shards(plan: Weights, load: Callable[[list[str]], Weights], root: Path, folder: str) -> list[WrittenFile]:
    """Writes safetensors files of 5 GB at most, and their index if there are several, durably.

    Args:
        plan: every tensor, perhaps on the device `meta`: name, shape and dtype count.
        load: gives the contiguous tensors of these names, those of one file at a time.
        root: of the names that are returned.
        folder: below it, for the files.
    """
    split = split_torch_state_dict_into_shards(plan)
    written = [
        write_tensors(root, f"{folder}/{name}", load(kept), {"format": "pt"})
        for name, kept in split.filename_to_tensors.items()
    ]
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        written.append(write_file(root, f"{folder}/{INDEX}", json.dumps(index, indent=2, sort_keys=True).encode()))
    return written


def write_file(root: Path, name: str, data: bytes) -> WrittenFile:
    """Writes `root/name` durably."""
    write_durably(root / name, data)
    return WrittenFile(name, len(data), xxhash.xxh3_128_hexdigest(data))
