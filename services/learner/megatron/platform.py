"""Platform of the training backend; no other module depends on the kind of machine.

    cpu   Megatron calls torch.cuda for its device, its allocations and its synchronisation: patched to return the CPU's
    cuda  nothing to do
    npu   torch_npu and MindSpeed's Megatron adaptor patch the same calls to return the NPU's

Call `prepare` before the first import of Megatron in a rank; after it no Hugging Face model may be built in that process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from services.common.config.settings import Platform
from services.learner.training.platform import prepare as prepare_device

_CPU_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "BFloat16", "Half")}
"""Result of `Tensor.type()` → the name that Megatron's optimizers compare it with."""

_TRACKER = "tracker."


def prepare(platform: Platform) -> None:
    """Prepares this process for the import of Megatron; a second call changes nothing."""
    prepare_device(platform)
    match platform:
        case Platform.CPU:
            _patch_cuda_calls_for_the_cpu()
            _recompute_without_cuda()
            _dispatch_without_streams()
        case Platform.NPU:
            importlib.import_module("mindspeed.megatron_adaptor")
        case Platform.CUDA:
            pass


def seed_tensor_parallel(seed: int) -> None:
    """Seeds the states of Megatron's tracker, from which it draws where positions are split over ranks; its groups must exist."""
    random_module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random_module.model_parallel_cuda_manual_seed(seed)


def tracked_states(platform: Platform) -> dict[str, torch.Tensor]:
    """Random number states of Megatron's tracker by name; it draws from the device's, so that a CPU has none."""
    return (
        {}
        if platform is Platform.CPU
        else {f"{_TRACKER}{name}": value for name, value in _tracker().get_states().items()}
    )


def set_tracked_states(states: dict[str, torch.Tensor]) -> None:
    """Restores those of `tracked_states` among the states."""
    tracked = {name.removeprefix(_TRACKER): value for name, value in states.items() if name.startswith(_TRACKER)}
    if tracked:
        _tracker().set_states(tracked)


def _tracker() -> Any:  # noqa: ANN401  Megatron comes without types
    return importlib.import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()


@cache
def _patch_cuda_calls_for_the_cpu() -> None:
    """Patches only what Megatron calls: wider patches have given Hugging Face models wrong logits, silently."""
    cpu = torch.device("cpu")
    cuda: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda: None,
        "set_device": lambda _: None,
    }
    tensor: dict[str, Any] = {"cuda": lambda self, *_, **__: self, "type": _type_named_as_on_cuda(torch.Tensor.type)}
    module: dict[str, Any] = {"cuda": lambda self, *_, **__: self}
    factories = {name: _redirected(getattr(torch, name)) for name in ("tensor", "zeros", "ones", "empty")}
    for owner, patches in ((torch.cuda, cuda), (torch.Tensor, tensor), (torch.nn.Module, module), (torch, factories)):
        for name, replacement in patches.items():
            setattr(owner, name, replacement)


@cache
def _recompute_without_cuda() -> None:
    """Recomputation keeps and restores the device's random state, which a CPU does not have: its own is kept beside it in any case."""
    for owner in (torch.cuda, torch.cuda.random):
        owner.get_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    tracker_module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker_module._set_cuda_rng_state = lambda *_, **__: None  # noqa: SLF001


@cache
def _dispatch_without_streams() -> None:
    """Megatron's exchange of positions between experts' ranks copies its counts to the host on a stream of its own; here they are there."""
    module: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher = module.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none"  # else its constructor makes one

    def counts_as_lists(self: Any, _: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:  # noqa: ANN401
        for name in ("input_splits", "output_splits"):
            if isinstance(counts := getattr(self, name), torch.Tensor):
                setattr(self, name, counts.tolist())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = counts_as_lists  # noqa: SLF001


def _redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with the CPU in place of device="cuda"."""

    @wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401  the factory's own arguments
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return build


def _type_named_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  a name or a converted tensor
        result = original(self, *args, **kwargs)
        return _CPU_TYPE_NAMES.get(result, result) if isinstance(result, str) else result

    return type_
