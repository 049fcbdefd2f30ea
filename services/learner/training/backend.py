"""Back end of the training: the seam between the trainer and what computes its models.

trainer ─► Backend ─► a model for each role ─► runs over micro-batches, and optimizer steps
                   └► the state of all of them, as this rank's part of a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from services.common.checkpoints.manifest import WrittenFile
from services.common.spec.learner import OptimizerFields
from services.learner.training.batch import MicroBatch, RowForm
from services.learner.training.layout import Layout
from services.learner.training.pools import Pools
from services.learner.training.tensor_file import Weights, write_tensors

OnOutput = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The last stage's function of a micro-batch and its output [R, …]: returns the summed loss, and its number of tokens."""


class Optimizer(Protocol):
    """AdamW of one role."""

    def zero_grad(self) -> None:
        """Clears the gradients of the previous step."""
        ...

    def step(self, loss: float, lr: float, device: torch.device) -> tuple[float, str]:
        """Takes a step of this learning rate on the reduced gradients, clipped to `clip_grad`: completely or not at all.

        Returns the gradients' norm over all ranks, before clipping, and why no step was taken: loss or norm is not finite.
        """
        ...

    def follow_weights(self) -> None:
        """Copies the model's weights, which were changed from outside, to the master weights."""
        ...


class Model(Protocol):
    """This rank's part of the model of one role."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """Those that this rank holds, or its parts of them."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """Its optimizer. Raises ValueError for a model that is not trained."""
        ...

    def run(self, micro_batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> None:
        """Runs it over micro-batches, as many on every rank; gradients are summed over them and the ranks.

        A policy's output is [R, V / TP] logits, that of a value model [R, 1] values.
        """
        ...

    def figures(self) -> dict[str, float]:
        """Figures of its runs with gradients since the last call, the same on every rank, which all call it at the same time."""
        ...

    def own_weights(self) -> Weights:
        """This rank's part of the weights, by its own names, with adapters merged; some are the parameters themselves."""
        ...

    def take_weights(self, weights: Weights) -> None:
        """Takes over what `own_weights` of a model of the same back end, architecture and place gave; a value head stays as it is."""
        ...

    def load_weights(self, model_dir: Path) -> None:
        """Reads this rank's part of a Hugging Face directory; ModelError if tensors are missing, or not of config.json's shapes."""
        ...

    def gather(self, dtype: torch.dtype | None, *, copy: bool = True) -> Weights | None:
        """The weights on rank 0, by their Hugging Face names; None on the other ranks. Every rank calls it at the same time.

        `dtype` None keeps that of the parameters; a cast to it is the only change to a weight. `lm_head.weight` is always included:
        otherwise an engine that packs its output layer would keep sampling with a stale one. Without `copy` some are the parameters
        themselves, on a CPU.
        """
        ...

    def adapter(self, base_model: str) -> AdapterFiles | None:
        """Its low-rank adapters on rank 0; None on the other ranks, and of a model that has none. Every rank calls it at the same time.

        `base_model`: what the adapters belong to.
        """
        ...


class Backend(Protocol):
    """Makes the models of a job's roles on this rank, and keeps their state."""

    @property
    def pools(self) -> Pools:
        """The ranks of all roles, and this one's place among them."""
        ...

    @property
    def layout(self) -> Layout:
        """This rank's place in its pool."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        ...

    @property
    def row_form(self) -> RowForm:
        """How the rows of a micro-batch are laid out where prompts are not shared."""
        ...

    @property
    def vocabulary_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the vocabulary of the logits is split; None where it is not."""
        ...

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the positions of a row; None where each has whole rows."""
        ...

    def policy(self, role: str, model_dir: Path, optimizer: OptimizerFields | None) -> Model:
        """Builds a policy with the directory's weights, trained if it has an optimizer; ModelError if this layout cannot train it.

        `role`: begin of its names in a checkpoint; empty for the actor, which is built first.
        """
        ...

    def value_model(self, role: str, model_dir: Path, optimizer: OptimizerFields) -> Model:
        """The same with a scalar head, whose values are 0 at first, in place of the output layer."""
        ...

    def copy_state(self, step: int, kl_coefficient: float | None) -> StateCopy:
        """Copies the present state of all roles; training may continue. `kl_coefficient`: see LoadedState."""
        ...

    def load_state(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> LoadedState:
        """Restores the state. Without `optimizer` the moments stay new; without `rng`, or in another layout, the random states stay.

        A role that the checkpoint has nothing of stays as it is.

        Raises:
            ConfigError: a file is missing, lacks a tensor, or is of another back end; with `optimizer` also: another dtype, or, in
                another layout, files of a release that does not say what the optimizer's states belong to.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Low-rank adapters as peft writes them."""

    tensors: Weights
    config: str
    """JSON of `adapter_config.json`."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A rank's state at one moment, in host memory."""

    name: str
    tensors: dict[str, torch.Tensor]
    about: str

    def write(self, folder: Path) -> WrittenFile:
        """Writes the file durably."""
        return write_tensors(folder, self.name, self.tensors, {"about": self.about})


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a checkpoint's part held beside the tensors."""

    step: int
    kl_coefficient: float | None
    """The adaptive β of the KL to the reference; None in the checkpoint of a job whose β is constant, or that has none."""
    absent: set[str]
    """Roles of the job that it has nothing of."""
