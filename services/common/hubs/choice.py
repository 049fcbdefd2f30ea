"""Choice of a repository's files: what a model needs and nothing that can run, or one data file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch

from services.common.errors import HubRefused, did_you_mean
from services.common.hubs.repository import HubFile, Repository
from services.common.models.directory import INDEX, MAX_JSON_BYTES, PICKLES, SINGLE
from services.common.spec.reference import Reference

CONFIG = "config.json"
TEXTS = (
    "*config.json", "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "special_tokens_map.json",
    "tokenizer.model", "*.tiktoken", "chat_template.json", "chat_template.jinja", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files of a model beside its weights, in the repository's main directory."""
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
"""A shard, and the name that all shards of one set of weights share: mostly `model`."""
_MAX_NAMES = 3


def choose(repository: Repository, max_bytes: int) -> tuple[HubFile, ...]:
    """The files to fetch, small ones first. Raises HubRefused, which names what is wrong."""
    wanted = [_data_file(repository)] if repository.reference.file else model_files(repository.files)
    require_size(repository.reference, sum(file.size for file in wanted), max_bytes)
    return tuple(sorted(wanted, key=lambda file: (file.size, file.path)))


def require_size(reference: Reference, total: int, max_bytes: int) -> None:
    """Raises HubRefused for more bytes than this site takes."""
    if total > max_bytes:
        limits = "MILLRACE_MAX_HUB_BYTES" + (" or MILLRACE_MAX_DATA_BYTES" if reference.file else "")
        raise HubRefused(f"takes {show_bytes(total)}, and {limits} allows {show_bytes(max_bytes)}")


def surveyed(files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Those that show whether the model can be trained here at all; they are small."""
    return tuple(file for file in files if fnmatch(file.path, "*config.json") or file.path == INDEX)


def _data_file(repository: Repository) -> HubFile:
    name = repository.reference.file
    found = {file.path: file for file in repository.files}
    if name not in found:
        raise HubRefused(f"the dataset has no file {name}{did_you_mean(name, found)}")
    return found[name]


def model_files(files: Sequence[HubFile]) -> list[HubFile]:
    """Of a directory's files those that a model needs: config, tokenizer, safetensors. Raises HubRefused, which names what it lacks."""
    names = {file.path for file in files}
    if CONFIG not in names:
        raise HubRefused(f"has no {CONFIG}: no model of the Hugging Face form")
    weights = [INDEX, *_shards(names)] if INDEX in names else [SINGLE]
    if not names.issuperset(weights) or weights == [INDEX]:
        raise HubRefused(_without_weights(names))
    wanted = [file for file in files if file.path in weights or any(fnmatch(file.path, text) for text in TEXTS)]
    wanted = [file for file in wanted if "/" not in file.path]
    for file in wanted:
        if file.path.endswith(".json") and file.size > MAX_JSON_BYTES:
            raise HubRefused(f"{file.path} is larger than {MAX_JSON_BYTES} bytes")
    return wanted


def _shards(names: set[str]) -> list[str]:
    """The shards of one set of weights in the main directory: a repository may have another beside it, which the index does not name."""
    sets: dict[str, list[str]] = {}
    for name in sorted(names):
        if "/" not in name and (shard := _SHARD.fullmatch(name)):
            sets.setdefault(shard[1], []).append(name)
    if "model" not in sets and len(sets) > 1:
        raise HubRefused(f"has shards of several sets of weights ({', '.join(sets)}), and none is named model")
    return sets.get("model") or next(iter(sets.values()), [])


def _without_weights(names: set[str]) -> str:
    pickles = sorted(name for name in names if any(name.endswith(suffix) for suffix in PICKLES))
    if pickles:
        listed = ", ".join(pickles[:_MAX_NAMES]) + (", …" if len(pickles) > _MAX_NAMES else "")
        return f"has its weights as pickles only ({listed}), which can run code: safetensors are needed"
    return f"has no {SINGLE}, nor an index of shards ({INDEX})"


def show_bytes(count: int) -> str:
    """A size for people: `1.2 GB`."""
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit in {"bytes", "kB"} else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
