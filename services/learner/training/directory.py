"""Hugging Face directory of a policy: weights in safetensors files, config, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open

from services.common.checkpoints.manifest import WrittenFile
from services.common.durable import write_durably
from services.common.models.directory import INDEX
from services.common.weights.dtypes import TORCH
from services.learner.training.tensor_file import Weights, write_tensors

CHAT_TEMPLATE = "chat_template.jinja"
"""File that transformers takes a template from, before all others."""
_INDEX_SUFFIX = INDEX.removeprefix("model")
_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of the files that are copied with the weights: config, tokenizer, chat template. No code, no other weights."""


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


def write_adapter(tensors: Weights, config: str, root: Path, folder: str) -> list[WrittenFile]:
    """Writes low-rank adapters to `root/folder` as peft has them, durably."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    return [
        write_tensors(root, f"{folder}/adapter_model.safetensors", tensors, {"format": "pt"}),
        write_file(root, f"{folder}/adapter_config.json", config.encode()),
    ]


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
