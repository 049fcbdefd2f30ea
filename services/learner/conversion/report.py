"""Report on weights: what a checkpoint or a Hugging Face directory holds. Reads headers only, without torch; verifies digests if wanted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import (
    CHECKPOINTS_DIR,
    FORMAT,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    check_size,
    newest_manifest,
    read_manifest,
    verify_files,
)
from services.common.checkpoints.origin import NAMES_PLACES, WEIGHTS_ONLY
from services.common.errors import ConfigError, ModelError
from services.common.jobs.folder import SPEC_FILE
from services.common.models.directory import inspect_model, read_json
from services.common.models.weight_files import check_tensors, read_headers
from services.common.weights.dtypes import TORCH

ACTOR = "actor"
CHECKPOINT, HUGGING_FACE = "checkpoint", "hugging_face"
_EMBEDDING_COPY = "output_layer.weight"
"""With tied embeddings a second copy on the last stage."""
_EXPERTS = ".experts.local_experts."
_RANK_FILE = re.compile(r"(?:[a-z]+-)?rank-(?P<rank>\d{5})\.safetensors")
"""The actor's ranks, and those of a role that has ranks of its own."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file; in a checkpoint the part that one rank holds."""

    role: str
    name: str
    shape: list[int]
    dtype: str
    file: str


@dataclass(slots=True)
class RoleReport:
    """What a checkpoint holds of one model."""

    parameters: int = 0
    tensors: int = 0
    """Over all ranks' files."""
    optimizer: bool = False
    """Whether there is state of its optimizer."""


@dataclass(slots=True)
class Report:
    """What a directory holds."""

    path: str
    kind: str
    """`checkpoint` or `hugging_face`."""
    architecture: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    """Layers, heads and sizes."""
    dtype: str = ""
    parameters: int = 0
    """Of the actor, or of the directory's model."""
    bytes: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)
    """Why it does not verify, or cannot be trained."""
    tensors: list[Tensor] = field(default_factory=list)
    job: str | None = None
    step: int | None = None
    weights_only: bool | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, RoleReport] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    """Formats of manifest and ranks' files, lineage and policy version, and whether its optimizer can be loaded in another layout."""
    verified: bool | None = None
    """Whether manifest and files match; None if that was not asked for, or there is no manifest."""

    def as_record(self, *, tensors: bool) -> dict[str, Any]:
        """JSON values; with `tensors` also the list of them."""
        record = asdict(self)
        if not tensors:
            record.pop("tensors")
        return record


def find_weights(name: str, home: Path) -> Path:
    """The directory that a job's id (its newest checkpoint), a job's folder, a checkpoint's or a model's directory names.

    Raises:
        ConfigError: there is no such directory, or it is neither; names it.
    """
    path = Path(name)
    if not path.is_dir():
        path = home / "jobs" / name
    if not path.is_dir():
        raise ConfigError(f"{name}: there is no such directory, and no such job in {home / 'jobs'}")
    if (path / CHECKPOINTS_DIR).is_dir() or (path / SPEC_FILE).is_file():
        path /= CHECKPOINTS_DIR
    if path.name == CHECKPOINTS_DIR:
        newest = newest_manifest(path) if path.is_dir() else None
        if newest is None:
            raise ConfigError(f"{path}: has no whole checkpoint")
        path = newest.path
    if not (path / MANIFEST).is_file() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: neither a checkpoint (it has no {MANIFEST}) nor a Hugging Face model directory (no config.json)"
        )
    return path.absolute()


def inspect(path: Path, *, verify: bool = True) -> Report:
    """The report on a directory from `find_weights`. With `verify` the digests of all files of a checkpoint are computed."""
    return _of_checkpoint(path, verify=verify) if (path / MANIFEST).is_file() else _of_model(path)


def _of_model(path: Path) -> Report:
    report = Report(str(path), HUGGING_FACE)
    config = read_json(path / "config.json")
    names = config.get("architectures")
    report.architecture = ", ".join(map(str, names)) if isinstance(names, list) else ""
    try:
        headers = read_headers(path)
        report.tensors = [
            Tensor(ACTOR, t.name, list(t.shape), TORCH[t.dtype], t.file.name)
            for t in sorted(headers.values(), key=lambda t: t.name)
        ]
        info = inspect_model(path)
        report.shape = {name: value for name, value in info.described().items() if name != "architecture"}
        check_tensors(path, headers, info, config)
    except ModelError as error:
        report.problems = [problem.message for problem in error.problems]
    report.dtype = ", ".join(sorted({tensor.dtype for tensor in report.tensors}))
    report.parameters = sum(math.prod(tensor.shape) for tensor in report.tensors)
    held = [file for file in path.iterdir() if file.is_file()]
    report.bytes, report.files = sum(file.stat().st_size for file in held), len(held)
    return report


def _of_checkpoint(path: Path, *, verify: bool) -> Report:
    report = Report(str(path), CHECKPOINT)
    try:
        checkpoint = read_manifest(path)
    except CheckpointError as error:
        report.problems, report.verified = [str(error)], False
        return report
    report.step, report.bytes, report.files = checkpoint.step, checkpoint.size, len(checkpoint.files)
    _add_identity(report, checkpoint)
    try:
        for file in checkpoint.files:
            check_size(path / file.name, file.bytes)
        if verify:
            verify_files(checkpoint)
            report.verified = True
        _add_ranks(report, checkpoint)
    except CheckpointError as error:
        report.problems.append(str(error))
        report.verified = False
    return report


def _add_identity(report: Report, checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    identity = state.get("identity")
    shape = identity.get("shape") if isinstance(identity, dict) else None
    if not isinstance(identity, dict) or not isinstance(shape, dict):
        report.problems.append(f"{checkpoint.path / MANIFEST}: does not say what it was made of")
        identity, shape = {}, {}
    report.architecture = str(shape.get("architecture", ""))
    report.shape = {name: value for name, value in shape.items() if name != "architecture"}
    report.job = str(identity.get("job_id", "")) or None
    report.weights_only = bool(state.get(WEIGHTS_ONLY))
    report.versions = {
        "manifest": FORMAT,
        "lineage": state.get("lineage"),
        "policy_version": checkpoint.step,
        "other_layouts": bool(state.get(NAMES_PLACES) or report.weights_only),
    }


def _add_ranks(report: Report, checkpoint: Checkpoint) -> None:
    """Adds layout, roles and tensors, from the headers of the ranks' files."""
    found = sorted(
        filter(None, (_RANK_FILE.fullmatch(file.name) for file in checkpoint.files)), key=lambda match: match[0]
    )
    if not found:
        report.problems.append(f"{checkpoint.path}: its manifest names no rank's file")
    for match in found:
        name, rank = match[0], int(match["rank"])
        about, tensors = _read_rank(checkpoint.path / name)
        layout = about.get("layout", {})
        if not report.layout:
            report.dtype = str(layout.get("dtype", ""))
            report.layout = {key: value for key, value in layout.items() if key != "dtype"}
            report.versions["rank_files"] = about.get("format")
        report.tensors += tensors
        _count(report, rank, tensors)
    report.roles = dict(sorted(report.roles.items()))
    report.parameters = report.roles.get(ACTOR, RoleReport()).parameters


def _count(report: Report, rank: int, tensors: list[Tensor]) -> None:
    """Adds the tensors of one rank of its pool to its roles; of parameters only what no other rank before it holds."""
    sizes = (int(report.layout.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "data", "context", "expert"))
    tp_size, dp_size, cp_size, ep_size = sizes
    tp_rank, replica = rank % tp_size, rank // tp_size % (dp_size * cp_size)
    tied, sharded = bool(report.shape.get("tie_word_embeddings")), report.layout.get("fsdp_size")
    for tensor in tensors:
        if not tensor.role:
            continue
        role = report.roles.setdefault(tensor.role, RoleReport())
        role.tensors += 1
        head, _, name = tensor.name.removeprefix(f"{tensor.role}.").partition(".")
        role.optimizer |= head == "optimizer"
        is_copy = tied and name == _EMBEDDING_COPY and tensor.shape[0] != 1
        if sharded is not None:
            role.parameters += math.prod(tensor.shape) if head == "model" and rank < int(sharded) else 0
        elif (
            head == "model"
            and replica < (ep_size if _EXPERTS in name else 1)
            and not is_copy
            and (tp_rank == 0 or _is_split(name, tensor.shape))
        ):
            role.parameters += math.prod(tensor.shape)


def _is_split(name: str, shape: list[int]) -> bool:
    """Whether tensor-parallel ranks hold different parts: matrices but a value head, and the bias of query, key and value."""
    return (len(shape) > 1 and shape[0] != 1) or name.endswith("linear_qkv.bias")


def _read_rank(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """What a rank's file says of itself, and its tensors. Raises CheckpointError for anything else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})["about"])
            if not isinstance(about, dict):
                raise CheckpointError(f"{path}: not the file of a rank")
            return about, list(_tensors(file, path.name))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not the file of a rank: {error}") from error


def _tensors(file: Any, name: str) -> Iterator[Tensor]:  # noqa: ANN401  safetensors comes without types
    for key in sorted(file.keys()):
        part, begin = file.get_slice(key), key.partition(".")[0]
        role = ACTOR if begin in {"model", "optimizer"} else "" if begin == "rng" else begin
        yield Tensor(role, key, list(part.get_shape()), TORCH[part.get_dtype()], name)
