"""Worker extension: the part of the rollout service that runs inside vLLM's worker and loads new weights from a staged file, in place.

vLLM mixes the class into its worker (`worker_extension_cls`); the engine calls the methods by name, on every worker at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.common.errors import WeightSyncError
from services.common.weights.snapshot import digest_of
from services.common.weights.tensor_file import map_tensors
from services.rollout.engine.process import watch_service
from services.rollout.engine.verify import Facts, check_installed

watch_service()


class WeightExtension:
    """Verifies and applies weights in two steps, so that a bad file is found while the old weights still sample."""

    model_runner: Any
    """Of vLLM's worker that this class is mixed into."""

    def millrace_beat(self) -> bool:
        """Replies, as a heartbeat for the watch."""
        return True

    def millrace_verify_weights(self, path: str, digests: dict[str, str]) -> str:
        """Hashes the staged file; changes nothing. Returns the first error that it finds, or ""."""
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

    def millrace_apply_weights(self, path: str, digests: dict[str, str], facts: Facts) -> tuple[float, int, int]:
        """Loads every tensor of the file over the weights in use, and then verifies those; the engine must be paused.

        Returns the seconds that it took, how many parameters could be compared with the file, and how many there are. An error leaves
        the weights half applied: the caller must not resume.
        """
        started = time.perf_counter()
        with safe_open(path, framework="pt") as file, torch.no_grad():
            left = set(file.keys())
            self.model_runner.reload_weights(weights_iterator=_checked(file, digests, left))
            if left:
                raise WeightSyncError(f"the engine did not take {len(left)} tensors: {', '.join(sorted(left)[:5])}")
            checked, total = check_installed(self.model_runner.get_model(), facts, file.get_tensor)
        return time.perf_counter() - started, checked, total


def _checked(file: Any, digests: dict[str, str], left: set[str]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401
    """Tensors of the file; each is hashed again when the loader takes it, and then removed from `left`."""
    for name in file.keys():  # noqa: SIM118  not a mapping
        tensor = file.get_tensor(name)
        if digest_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hex() != digests.get(name):
            raise WeightSyncError(f"{name}: the bytes changed after they had been verified")
        left.discard(name)
        yield name, tensor
