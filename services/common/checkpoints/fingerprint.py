"""Fingerprint of the job that a checkpoint belongs to: a checkpoint of another job is refused, and the differences are listed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.common.differences import MISSING, differences
from services.common.models.directory import inspect_model
from services.common.spec.job import JobSpec

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
_TEXTS = {".json", ".jinja", ".txt", ".model"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Inputs from which a job computes its steps. As JSON values it is part of every manifest's state."""

    job_id: str
    spec: dict[str, Any]
    """The resolved spec, as JSON values."""
    dataset: str
    """Fingerprint of the training source."""
    tokenizer: str
    """Digest of the model's config and tokenizer files."""
    weights: str
    """Digest of the model's weights: their sizes, and samples spread over each file."""
    shape: dict[str, Any]
    """The model's shape, from its config.json."""

    def state(self) -> dict[str, Any]:
        """The identity as JSON values."""
        return asdict(self)

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """Differences from the identity in a manifest's state, a line each; a setting that is newer than the manifest does not count."""
        lines = [
            f"{name}: {state.get(name)} there, {getattr(self, name)} here"
            for name in ("job_id", "dataset", "tokenizer", "weights")
            if state.get(name) != getattr(self, name)
        ]
        for path, there, here in differences(state.get("spec", {}), self.spec):
            if there is not MISSING:
                lines.append(f"{path}: {there} there, " + ("unknown here" if here is MISSING else f"{here} here"))
        return lines


def identity_of(job_id: str, spec: JobSpec, model_dir: Path, dataset: str) -> Identity:
    """The job's identity; reads samples of the model's large files. Raises ModelError when it is not complete."""
    return Identity(
        job_id=job_id,
        spec=spec.model_dump(mode="json"),
        dataset=dataset,
        tokenizer=text_digest(model_dir),
        weights=weight_digest(model_dir),
        shape=inspect_model(model_dir).described(),
    )


def text_digest(model_dir: Path) -> str:
    """Digest of a model's config and tokenizer files."""
    return _digest(model_dir, _TEXTS)


def weight_digest(model_dir: Path) -> str:
    """Digest of a model's weights: their sizes, and samples spread over each file."""
    return _digest(model_dir, {".safetensors"})


def _digest(folder: Path, suffixes: Collection[str]) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in suffixes):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
