"""A job's exported checkpoint in the engine: checked against its manifest, then taken in place like any other version.

checkpoints/step-00000200/MANIFEST.json     sizes and xxh3-128 of every file, by the learner
checkpoints/step-00000200/hf/               config, tokenizer, safetensors: the export

the engine of the job's own model (already up after the job) ◄── weights of the export, staged and activated
the model is gone or is another one by now: the engine starts with the export itself
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import xxhash
from redis.asyncio import Redis
from safetensors import SafetensorError, safe_open

from services.common.config.settings import Settings
from services.common.errors import MillraceError, ModelError, WeightSyncError
from services.common.jobs import deaths
from services.common.jobs.deaths import Death
from services.common.jobs.record import JobRecord
from services.common.models.directory import resolve_model
from services.common.weights.dtypes import TORCH
from services.common.weights.snapshot import TensorSpec, UInt8Array, digest_of
from services.common.weights.tensor_file import map_tensors
from services.common.weights.version import PolicyVersion
from services.rollout.engine.engine import Engine
from services.rollout.engine.model_tensors import EMBEDDING, LM_HEAD, model_shapes
from services.rollout.engine.types import StagedWeights
from services.rollout.engine.update import EngineError
from services.rollout.weights.staging import Stage, default_stage_directory

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
BLOCK_BYTES = 8 << 20
_WEIGHTS = {".safetensors"}
_INDEX = "model.safetensors.index.json"
DEADLY = 2
"""So many servers that died while they loaded a checkpoint are enough."""


class ExportLoader:
    """Brings exported checkpoints into one engine."""

    def __init__(self, engine: Engine, settings: Settings, redis: Redis, name: str) -> None:
        """`redis`: where deaths of servers are kept; `name`: this rollout server's."""
        self._engine, self._settings, self._redis, self._name = engine, settings, redis, name

    async def load(self, record: JobRecord, export: Path) -> None:
        """The engine samples with the export's weights, under their version, once this returns.

        Raises:
            ModelError: the checkpoint is gone or damaged, the engine does not take it, or servers died of it.
            EngineError: the weights in the engine are not known to be whole.
        """
        await self._refuse_deadly(record)
        await deaths.serving(self._redis, record.id, self._name, loading=True)
        try:
            await self._load(record, export)
        except EngineError as error:
            death = Death(self._name, f"{export}: {error}", time.time(), loading=True)
            await deaths.report(self._redis, record.id, death)
            raise
        finally:
            await deaths.served(self._redis, record.id, self._name)

    async def _refuse_deadly(self, record: JobRecord) -> None:
        """A checkpoint that servers died of, again and again, is loaded no more until those deaths are forgotten."""
        ended = record.finished_at or 0.0
        dead = [one for one in await deaths.deaths(self._redis, record.id) if one.loading and one.at > ended]
        if len(dead) >= DEADLY:
            raise ModelError(f"{len(dead)} servers ended while they loaded it: {dead[-1].cause}")

    async def _load(self, record: JobRecord, export: Path) -> None:
        started = time.monotonic()
        try:
            version = await asyncio.to_thread(check_export, export)
            base = await asyncio.to_thread(self._base, record, export)
            await self._engine.start(base or export, record.spec)
            if base is None:
                await self._engine.label.change(version)
            else:
                await self._activate(export, version)
        except WeightSyncError as error:
            raise ModelError(f"{export}: {error}") from error
        except MillraceError:
            raise
        except Exception as error:  # whatever the libraries raise that read it
            raise ModelError(f"{export}: {type(error).__name__}: {error}") from error
        log.info("policy version %s from %s after %.1f s", version, export, time.monotonic() - started)

    def _base(self, record: JobRecord, export: Path) -> Path | None:
        """The job's own model, if it still is what the export was made from in all but the weights."""
        try:
            base = resolve_model(record.spec.model.path, self._settings)
            return base if model_shapes(base) == model_shapes(export) and same_tokenizer(base, export) else None
        except (ModelError, OSError):
            return None

    async def _activate(self, export: Path, version: PolicyVersion) -> None:
        home, shared_memory = self._settings.home.resolve(), self._settings.shared_memory
        stage = Stage(default_stage_directory(self._name, home, 2 * _bytes(export), shared_memory))
        try:
            staged = await asyncio.to_thread(stage_export, export, stage, version)
            await self._engine.activate(staged)
        finally:
            stage.close()


def check_export(export: Path) -> PolicyVersion:
    """The policy version of an export whose every file is as the manifest says. Blocks: it hashes the weights.

    Raises:
        ModelError: the checkpoint is gone, or a file of the export is missing or damaged; names it.
    """
    manifest = export.parent / MANIFEST
    try:
        document = json.loads(manifest.read_text())
        version = PolicyVersion(int(document["state"]["lineage"]), int(document["step"]))
        files = {str(name): dict(entry) for name, entry in dict(document["files"]).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{manifest}: cannot be read: {error}") from error
    exported = {name: entry for name, entry in files.items() if Path(name).parts[0] == export.name}
    if not exported:
        raise ModelError(f"{manifest}: names no file of {export.name}/")
    for name, entry in exported.items():
        _check(export.parent / name, entry)
    return version


def same_tokenizer(base: Path, export: Path) -> bool:
    """Whether config, tokenizer and chat template of the export are those of the model, byte by byte."""
    names = [file.name for file in export.iterdir() if file.suffix not in _WEIGHTS and file.name != _INDEX]
    return all((base / name).is_file() and filecmp.cmp(base / name, export / name, shallow=False) for name in names)


def stage_export(export: Path, stage: Stage, version: PolicyVersion) -> StagedWeights:
    """The export's weights as one staged file, the output head included. Blocks: it copies the weights.

    Raises:
        WeightSyncError: a file cannot be read, or there is no room.
    """
    started = time.monotonic()
    try:
        tensors = _tensors(export)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{export}: cannot be read: {error}") from error
    if not tensors:
        raise WeightSyncError(f"{export}: has no weights any more")
    if LM_HEAD not in tensors and EMBEDDING in tensors:
        tensors[LM_HEAD] = tensors[EMBEDDING]
    specs = [
        TensorSpec(name, dtype, shape, data.nbytes, digest_of(data)) for name, (dtype, shape, data) in tensors.items()
    ]
    with stage.begin(version.lineage, version.n, specs) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write(name, 0, data.data)
        return writer.commit(fetch_s=time.monotonic() - started, wire_bytes=0)


def _tensors(export: Path) -> dict[str, tuple[str, tuple[int, ...], UInt8Array]]:
    """Name → dtype, shape and plain bytes, mapped."""
    found: dict[str, tuple[str, tuple[int, ...], UInt8Array]] = {}
    for file in sorted(export.glob("*.safetensors")):
        data = map_tensors(file)
        with safe_open(file, framework="numpy") as opened:
            for name in data:
                part = opened.get_slice(name)
                dtype = TORCH.get(part.get_dtype(), part.get_dtype())
                found[name] = (dtype, tuple(part.get_shape()), data[name])
    return found


def _bytes(export: Path) -> int:
    return sum(file.stat().st_size for file in export.glob("*.safetensors"))


def _check(file: Path, entry: Mapping[str, object]) -> None:
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    if digest.hexdigest() != entry.get("xxh3"):
        raise ModelError(f"{file}: its checksum differs from the manifest's")
