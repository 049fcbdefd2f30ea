"""The part of the rollout service that runs inside vLLM's worker: takes new weights from a staged file, in place.

vLLM mixes the class into its worker (`worker_extension_cls`); the engine calls the methods by name, on every worker at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.common.errors import WeightSyncError
from services.common.snapshot import digest_of
from services.rollout.orphans import watch_service
from services.rollout.tensor_file import map_tensors

watch_service()


class WeightExtension:
    """Two steps, so that whatever can be wrong with a file is found while the old weights still sample."""

    model_runner: Any
    """vLLM's, of the worker that this is mixed into."""

    def millrace_verify_weights(self, path: str, digests: dict[str, str]) -> str:
        """Hashes the staged file; changes nothing. Returns what is wrong with it, or nothing."""
        try:
            tensors = map_tensors(Path(path))
        except WeightSyncError as error:
            return str(error)
        if tensors.keys() != digests.keys():
            odd = sorted(tensors.keys() ^ digests.keys())
            return f"{path}: {len(odd)} tensors are not in both the file and its manifest: {', '.join(odd[:5])}"
        for name, data in tensors.items():
            if digest_of(data).hex() != digests[name]:
                return f"{path}: {name}: the bytes do not match their digest"
        return ""

    def millrace_apply_weights(self, path: str) -> float:
        """Loads every tensor of the file over the weights in use; the engine must be paused. Returns the seconds it took.

        An error leaves the weights half applied: the caller must not resume.
        """
        started = time.perf_counter()
        with safe_open(path, framework="pt") as file, torch.no_grad():
            names = file.keys()
            self.model_runner.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
        return time.perf_counter() - started
