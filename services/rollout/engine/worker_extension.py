"""Worker extension: the part of the rollout service that runs inside vLLM's worker and loads new weights from a staged file, in place.

vLLM mixes the class into its worker (`worker_extension_cls`); the engine calls the methods by name, on every worker at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from vllm.platforms import current_platform

from services.common.errors import WeightSyncError
from services.common.service.host import keep_freed_memory
from services.rollout.engine.process import watch_service
from services.rollout.engine.verify import Facts, check_installed, read_verified

watch_service()
# vLLM's attention computes on AMX tiles where the processor has them, and does not request the kernel's permission: where oneDNN has not
# done that before, for a larger model's layers, the first such instruction ends the process (SIGILL). Elsewhere this does nothing.
torch.cpu._init_amx()  # noqa: SLF001  torch has no public name for it
if current_platform.is_cpu():
    keep_freed_memory()

_PACKS_ALL = (0, 32)
"""Release of vLLM that was tested to pack new weights of every layer but experts."""


class WeightExtension:
    """Applies weights, and verifies what is installed."""

    model_runner: Any
    """Of vLLM's worker that this class is mixed into."""

    def millrace_beat(self) -> bool:
        """Replies, as a heartbeat for the monitor."""
        return True

    def millrace_apply_weights(self, path: str, digests: dict[str, str], facts: Facts) -> tuple[float, int, int]:
        """Loads every tensor of the file over the weights in use, and then verifies those; the engine must be paused.

        Only what sums of bits cannot prove is hashed here, where nothing is sampled.
        Returns the seconds that it took, how many parameters could be compared with the file, and how many there are. An error leaves
        the weights half applied: the caller must not resume.
        """
        started = time.perf_counter()
        with safe_open(path, framework="pt") as file, torch.no_grad():
            left = set(file.keys())
            self.model_runner.reload_weights(weights_iterator=_tensors(file, left))
            _pack_again(self.model_runner.get_model())
            if left:
                raise WeightSyncError(f"the engine did not take {len(left)} tensors: {', '.join(sorted(left)[:5])}")
            checked, total = check_installed(
                self.model_runner.get_model(), facts, partial(read_verified, file, digests)
            )
        return time.perf_counter() - started, checked, total


def _tensors(file: Any, left: set[str]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401
    """Tensors of the file; each is removed from `left` when the loader takes it."""
    for name in file.keys():  # noqa: SIM118  not a mapping
        left.discard(name)
        yield name, file.get_tensor(name)


def _pack_again(model: torch.nn.Module) -> None:
    """Packs for the CPU's kernels what vLLM leaves as it is in the file when it loads weights again."""
    if current_platform.is_cpu():
        _pack_output_layer(model)
        _pack_experts(model)


def _pack_output_layer(model: torch.nn.Module) -> None:
    """Of an output layer that shares the embedding's weight: vLLM 0.23 samples with the old one."""
    packed: list[Any] = [layer for layer in model.modules() if getattr(layer, "cpu_linear", None) is not None]
    if not packed:
        return
    import vllm
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if vllm.__version_tuple__ >= _PACKS_ALL:
        return
    for layer in packed:
        if layer.weight.numel():  # else vLLM has packed it, and kept nothing else
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _pack_experts(model: torch.nn.Module) -> None:
    """Of experts: vLLM 0.32 packs those of a layer only once, and reads new ones as if they were packed."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
