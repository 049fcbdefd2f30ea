"""Exports in the engine: an exported checkpoint is checked against its manifest, then activated in place like any other version.

checkpoints/step-00000200/MANIFEST.json     sizes and xxh3-128 of every file, by the learner
checkpoints/step-00000200/hf/               config, tokenizer, safetensors: the export

the engine runs the job's own model (or can start with it)   ◄── weights of the export, staged and activated
the model is gone, or differs in more than the weights       the engine starts with the export itself
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import logging
import time
from pathlib import Path

from redis.asyncio import Redis
from safetensors import SafetensorError, safe_open

from services.common.checkpoints.manifest import MANIFEST, digest_of_file
from services.common.config.settings import Settings
from services.common.errors import MillraceError, ModelError, WeightSyncError
from services.common.jobs import deaths
from services.common.jobs.deaths import Death
from services.common.jobs.record import JobRecord
from services.common.models.directory import INDEX, resolve_model
from services.common.models.weight_files import EMBEDDING, LM_HEAD, weight_bytes
from services.common.weight_sync.staging import Stage, StagedWeights, default_stage_directory
from services.common.weights.dtypes import TORCH
from services.common.weights.snapshot import PolicyVersion, TensorSpec, UInt8Array, digest_of
from services.common.weights.tensor_file import map_tensors
from services.rollout.engine.engine import Engine
from services.rollout.engine.model_tensors import model_shapes
from services.rollout.engine.update import EngineError

log = logging.getLogger(__name__)

_MAX_DEATHS = 2
"""A checkpoint is refused after so many servers died while they loaded it."""


class ExportLoader:
    """Loads exported checkpoints into one engine."""

    def __init__(self, engine: Engine, settings: Settings, redis: Redis, name: str) -> None:
        """`redis`: stores the deaths of servers; `name`: this rollout server's."""
        self._engine, self._settings, self._redis, self._name = engine, settings, redis, name

    async def load(self, record: JobRecord, export: Path) -> None:
        """Loads the export's weights; the engine samples with them, under their version, once this returns.

        Raises:
            ModelError: the checkpoint is gone or damaged, the engine refuses it, or servers died while they loaded it.
            EngineError: the weights in the engine are not known to be complete.
        """
        found, ended = await deaths.deaths(self._redis, record.id), record.finished_at or 0.0
        dead = [death for death in found if death.loading and death.at > ended]
        if len(dead) >= _MAX_DEATHS:  # refused until these deaths are forgotten
            raise ModelError(f"{len(dead)} servers ended while they loaded it: {dead[-1].cause}")
        await deaths.serving(self._redis, record.id, self._name, loading=True)
        try:
            await self._load(record, export)
        except EngineError as error:
            death = Death(self._name, f"{export}: {error}", time.time(), loading=True)
            await deaths.report(self._redis, record.id, death)
            raise
        finally:
            await deaths.served(self._redis, record.id, self._name)

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
        except Exception as error:  # whatever the libraries raise for its files
            raise ModelError(f"{export}: {type(error).__name__}: {error}") from error
        log.info("policy version %s from %s after %.1f s", version, export, time.monotonic() - started)

    def _base(self, record: JobRecord, export: Path) -> Path | None:
        """The job's own model, if the export still differs from it in the weights only."""
        try:
            base = resolve_model(record.spec.model.path, self._settings)
            return base if model_shapes(base) == model_shapes(export) and same_tokenizer(base, export) else None
        except (ModelError, OSError):
            return None

    async def _activate(self, export: Path, version: PolicyVersion) -> None:
        home, shared_memory = self._settings.home.resolve(), self._settings.shared_memory
        stage = Stage(default_stage_directory(self._name, home, 2 * weight_bytes(export), shared_memory))
        try:
            staged = await asyncio.to_thread(stage_export, export, stage, version)
            await self._engine.activate(staged)
        finally:
            stage.close()


def check_export(export: Path) -> PolicyVersion:
    """Policy version of an export, after a check of all its files against the manifest. Blocks: it hashes the weights.

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
        file = export.parent / name
        try:
            digest = digest_of_file(file)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
        if digest != entry.get("xxh3"):
            raise ModelError(f"{file}: its checksum differs from the manifest's")
    return version


def same_tokenizer(base: Path, export: Path) -> bool:
    """Whether config, tokenizer and chat template of the export are byte for byte those of the model."""
    names = [file.name for file in export.iterdir() if file.suffix != ".safetensors" and file.name != INDEX]
    return all((base / name).is_file() and filecmp.cmp(base / name, export / name, shallow=False) for name in names)


def stage_export(export: Path, stage: Stage, version: PolicyVersion) -> StagedWeights:
    """Stages the export's weights, the output head included, as one file. Blocks: it copies the weights.

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
    """Name → dtype, shape and plain bytes of the tensors, mapped from the files."""
    found: dict[str, tuple[str, tuple[int, ...], UInt8Array]] = {}
    for file in sorted(export.glob("*.safetensors")):
        data = map_tensors(file)
        with safe_open(file, framework="numpy") as opened:
            for name in data:
                part = opened.get_slice(name)
                dtype = TORCH.get(part.get_dtype(), part.get_dtype())
                found[name] = (dtype, tuple(part.get_shape()), data[name])
    return found
