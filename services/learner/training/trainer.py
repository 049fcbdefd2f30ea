"""Trainer of one rank: every rank of a job makes the same calls, in the same order, whatever roles it holds.

sequences ─► actor, reference, critic: log-probs, values ─► columns ─► ┌─ critic: optimizer step ─┐ ─► export (rank 0) | save
                                                                       └─ actor:  optimizer step ─┘ for each mini-batch and epoch
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.common.checkpoints.manifest import EXPORT, WrittenFile
from services.common.spec.job import JobSpec
from services.common.spec.learner import OptimizerFields
from services.common.streams.types import Float32Array
from services.learner.algorithms.kl import adapted_coefficient
from services.learner.algorithms.losses import LossFunction
from services.learner.algorithms.values import explained_variance
from services.learner.groups.sequence import Sequence
from services.learner.training.actor import Actor
from services.learner.training.backend import Backend, Model
from services.learner.training.background import BackgroundWriter
from services.learner.training.batch import response_offsets
from services.learner.training.columns import Columns
from services.learner.training.critic import Critic
from services.learner.training.directory import write_adapter, write_directory
from services.learner.training.dtypes import torch_dtype
from services.learner.training.estimates import Estimator
from services.learner.training.passes import Passes, PreparedBatch
from services.learner.training.policy import Policy
from services.learner.training.pools import ACTOR
from services.learner.training.schedule import learning_rate
from services.learner.training.stats import StepStats
from services.learner.training.update import Update, mean_of

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Subdirectory of a checkpoint."""


class Trainer:
    """One rank's part of the policy in training."""

    def __init__(
        self,
        model_dir: Path,
        spec: JobSpec,
        backend: Backend,
        loss_fn: LossFunction,
        *,
        critic_dir: Path | None = None,
        reference_dir: Path | None = None,
    ) -> None:
        """Loads the models; ConfigError if one cannot be trained.

        `critic_dir`, `reference_dir`: Hugging Face directories of those roles, if the job has them; None: the actor's weights.
        """
        self._model_dir = Path(model_dir)
        self._spec = spec
        self._copies_actor = {"critic": critic_dir is None, "reference": reference_dir is None}
        self._backend, self.pools = backend, backend.pools
        self.layout, self.device = backend.layout, backend.device
        self._passes = passes = Passes(spec.learner, backend)
        self._actor: Actor | None = None
        self._critic: Critic | None = None
        self._reference: Policy | None = None
        if self.pools.holds(ACTOR):
            self._actor = Actor(backend.policy(ACTOR, self._model_dir, spec.learner), spec, backend, passes, loss_fn)
        if self.pools.holds("critic") and spec.critic is not None:
            value_model = backend.value_model("critic", critic_dir or self._model_dir, spec.critic)
            self._critic = Critic(value_model, spec.critic, backend, passes)
        if self.pools.holds("reference"):
            frozen = backend.policy("reference", reference_dir or self._model_dir, None)
            self._reference = Policy(frozen, spec, backend, passes)
        self._estimator = Estimator(spec, self.pools, self._actor, self._critic, self._reference, self.device)
        self._kl_coefficient = spec.algorithm.kl_coefficient
        self._writer = BackgroundWriter()
        self.step = 0
        """Training steps so far, including the skipped ones."""

    def train(self, sequences: list[Sequence]) -> StepStats:
        """One training step on the global batch; every rank gets the whole batch. Its order only affects rounding.

        It is one optimizer step of each role, or one for each mini-batch and epoch. A loss is the sum of token losses over the batch, or
        mini-batch, divided by its number of unmasked tokens. If it or the gradient is not finite, weights and optimizer of the role stay
        unchanged, and the stats give the reason.
        """
        self.step += 1
        batch = self._passes.prepare(sequences)
        if batch.tokens == 0:
            stats = self._stats(batch, [batch], [], [], {}, skipped="no token to train on")
            self._follow(stats)
            return stats
        columns = self._estimator.columns(batch, self.step, self._kl_coefficient)
        figures = self._figures(batch, columns)
        parts = self._mini_batches(batch)
        actor_updates: list[Update] = []
        critic_updates: list[Update] = []
        for part in parts * self._spec.learner.ppo_epochs:
            if self._critic is not None:
                critic_updates.append(self._critic.update(part, columns, self._rate(self._critic.spec)))
            if self._actor is not None and not self._warms_critic_up:
                rate = self._rate(self._spec.learner)
                actor_updates.append(self._actor.update(part, columns, rate, self._kl_coefficient))
        actor_updates = self._everywhere(ACTOR, actor_updates)
        critic_updates = self._everywhere("critic", critic_updates) if self._spec.critic is not None else []
        stats = self._stats(batch, parts, actor_updates, critic_updates, figures)
        self._follow(stats)
        return stats

    def logprobs(self, sequences: list[Sequence]) -> list[Float32Array]:
        """The log-prob of each response token under the current weights, float32 [R] per sequence, on every rank."""
        return self._logprobs(ACTOR, self._actor, sequences)

    def values(self, sequences: list[Sequence]) -> list[Float32Array]:
        """The critic's value of each response token, float32 [R] per sequence, on every rank. Raises ValueError without a critic."""
        if self._spec.critic is None:
            raise ValueError("the job has no critic")
        own = None if self._critic is None else self._critic.values(self._passes.prepare(sequences))
        return self._split("critic", own, sequences)

    def reference_logprobs(self, sequences: list[Sequence]) -> list[Float32Array]:
        """The same under the reference. Raises ValueError without one."""
        if self._spec.reference is None:
            raise ValueError("the job has no reference")
        return self._logprobs("reference", self._reference, sequences)

    def finite(self) -> bool:
        """Whether every parameter of every rank is finite; the same on all."""
        mine = all(
            bool(torch.isfinite(parameter).all())
            for model in self._models().values()
            for parameter in model.parameters()
        )
        return all(self.pools.gathered(mine))

    def export(self, *, copy: bool = True) -> dict[str, torch.Tensor] | None:
        """Hugging Face name → CPU tensor in `model.dtype`, always with `lm_head.weight`, on rank 0; None elsewhere.

        Without `copy` they may be the parameters themselves, which the next step changes.
        """
        if self._actor is None:
            return None
        return self._actor.model.gather(torch_dtype(self._spec.model.dtype), copy=copy)

    def save(self, folder: Path, *, export: bool = False) -> None:
        """Copies every rank's part of a checkpoint to host memory, and begins to write it into the directory, which all ranks share.

        With `export`, rank 0 also writes `hf/`, a Hugging Face directory: weights in the initial model's dtypes, config, tokenizer; and
        `adapter/` with the adapters, if the actor has such, which are also part of these weights.
        Returns when the copy is made; with it the state needs twice its host memory. `saved` reports the end of the writing.
        """
        adaptive = self._spec.algorithm.kl_target is not None
        state = self._backend.copy_state(self.step, self._kl_coefficient if adaptive else None)
        weights = adapter = None
        if export and self._actor is not None:
            weights = self._actor.model.gather(None)
            adapter = self._actor.model.adapter(str(self._spec.model.path))
        template = self._spec.model.chat_template

        def write() -> list[WrittenFile]:
            folder.mkdir(parents=True, exist_ok=True)
            exported = [] if weights is None else write_directory(weights, self._model_dir, folder, EXPORT, template)
            if adapter is not None:
                exported += write_adapter(adapter.tensors, adapter.config, folder, ADAPTER)
            return [state.write(folder), *exported]

        self._writer.start(write)

    def saved(self, *, wait: bool = False) -> list[dict[str, Any]] | None:
        """Every rank's report of the last `save` (see BackgroundWriter), the same on all; None while any rank is writing."""
        if wait:
            self._writer.join()
        reports = self.pools.gathered(self._writer.report)
        return None if None in reports else reports

    def load(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> None:
        """Restores the state of a `save`, bit for bit on a CPU. Options and errors are those of `Backend.load_state`."""
        loaded = self._backend.load_state(Path(folder), optimizer=optimizer, rng=rng)
        self.step = loaded.step
        self._begin(loaded.absent)
        if self._spec.algorithm.kl_target is not None and loaded.kl_coefficient is not None:
            self._kl_coefficient = loaded.kl_coefficient
        dist.barrier()

    def load_weights(self, folder: Path, *, hugging_face: bool) -> None:
        """Starts at step 0 from the weights of a checkpoint or of a Hugging Face directory.

        A critic or reference without a directory of its own begins with a checkpoint's, or else with the actor's weights.

        Raises:
            ConfigError: the checkpoint is incomplete, or the directory's tensors do not fit the model.
        """
        absent = self._models().keys() - {ACTOR}
        if not hugging_face:
            absent = self._backend.load_state(folder, optimizer=False, rng=False).absent
        elif self._actor is not None:
            self._actor.model.load_weights(folder)
            self._actor.model.optimizer.follow_weights()
        self._begin(absent)
        self.step = 0
        dist.barrier()

    def _begin(self, absent: set[str]) -> None:
        """Gives these roles, of which a checkpoint has nothing, the actor's weights, unless they have a directory of their own.

        `absent`: those of this rank's pool.
        """
        everywhere = set().union(*self.pools.gathered(sorted(absent)))
        for role in sorted(everywhere):
            if self._copies_actor[role]:
                self._copy_actor_to(role)

    def _copy_actor_to(self, role: str) -> None:
        """Every rank calls it; the role's ranks take over the weights of the actor's ranks of the same places."""
        model, actor = self._models().get(role), None if self._actor is None else self._actor.model
        if model is None:
            if actor is not None:
                self.pools.send(actor.own_weights(), role)
            return
        model.take_weights(self.pools.receive() if actor is None else actor.own_weights())
        if role == "critic":
            model.optimizer.follow_weights()

    def _follow(self, stats: StepStats) -> None:
        """After a step: adapts β, and lets the reference follow the actor, where the job has that."""
        algorithm, kl = self._spec.algorithm, stats.metrics.get("reference_kl")
        if algorithm.kl_target is not None and kl is not None and math.isfinite(kl):
            self._kl_coefficient = adapted_coefficient(
                self._kl_coefficient, kl, stats.sequences, target=algorithm.kl_target, horizon=algorithm.kl_horizon
            )
        interval = None if self._spec.reference is None else self._spec.reference.rebase_interval_steps
        if interval is not None and self.step % interval == 0:
            self._copy_actor_to("reference")

    @property
    def _warms_critic_up(self) -> bool:
        return self._spec.critic is not None and self.step <= self._spec.critic.warmup_steps

    def _rate(self, optimizer: OptimizerFields) -> float:
        return learning_rate(optimizer, self.step, self._spec.learner.steps)

    def _mini_batches(self, batch: PreparedBatch) -> list[PreparedBatch]:
        """The parts that one optimizer step takes each, in the batch's order of groups."""
        size = self._spec.learner.mini_batch_size
        groups = list(dict.fromkeys(s.group_id for s in batch.sequences))
        if size is None or size >= len(groups):
            return [batch]
        part_of = {group: place // size for place, group in enumerate(groups)}
        offsets = response_offsets(batch.sequences)
        parts: list[tuple[list[Sequence], list[int]]] = [([], []) for _ in range(-(-len(groups) // size))]
        for sequence, offset in zip(batch.sequences, offsets, strict=False):
            chosen, places = parts[part_of[sequence.group_id]]
            chosen.append(sequence)
            places.append(offset)
        prepared = [self._passes.prepare(chosen, places) for chosen, places in parts]
        return [part for part in prepared if part.tokens > 0]

    def _figures(self, batch: PreparedBatch, columns: Columns) -> dict[str, float]:
        """Figures of the whole batch, before its first optimizer step."""
        figures = {}
        if columns.values is not None and columns.returns is not None:
            mask = np.concatenate([s.loss_mask for s in batch.sequences])
            values, returns = columns.values.cpu().numpy(), columns.returns.cpu().numpy()
            figures["explained_variance"] = explained_variance(values, returns, mask)
        if self._spec.algorithm.wants_reference:
            figures["kl_coefficient"] = self._kl_coefficient
        return figures

    def _stats(
        self,
        batch: PreparedBatch,
        parts: list[PreparedBatch],
        actor_updates: list[Update],
        critic_updates: list[Update],
        figures: dict[str, float],
        skipped: str = "",
    ) -> StepStats:
        actor = mean_of(actor_updates) if actor_updates else None
        metrics = dict(figures) if actor is None else actor.metrics | figures
        if self._spec.updates_per_step > 1:
            metrics["optimizer_steps"] = float(len(actor_updates))
        if critic_updates and self._spec.critic is not None:
            critic, rate = mean_of(critic_updates), self._rate(self._spec.critic)
            metrics |= critic.metrics
            metrics |= {"value_loss": critic.loss, "critic_grad_norm": critic.grad_norm, "critic_lr": rate}
            skipped = skipped or (f"critic: {critic.skipped}" if critic.skipped else "")
        skipped = actor.skipped if actor is not None and actor.skipped else skipped
        if skipped and actor_updates:
            log.warning("step %d left weights as they are: %s", self.step, skipped)
        untrained = math.nan if critic_updates else 0.0
        return StepStats(
            step=self.step,
            loss=untrained if actor is None else actor.loss,
            grad_norm=untrained if actor is None else actor.grad_norm,
            lr=self._rate(self._spec.learner),
            tokens=batch.tokens,
            sequences=len(batch.sequences),
            micro_batches=sum(len(part.micro_batches) for part in parts),
            padding=1.0 - sum(part.real for part in parts) / sum(part.computed for part in parts),
            skipped=skipped,
            metrics=metrics,
        )

    def _models(self) -> dict[str, Model]:
        """Role → its model, of the roles that this rank holds."""
        roles = {ACTOR: self._actor, "critic": self._critic, "reference": self._reference}
        return {name: role.model for name, role in roles.items() if role is not None}

    def _everywhere(self, role: str, updates: list[Update]) -> list[Update]:
        """The role's updates, on every rank."""
        return [Update(**update) for update in self.pools.shared(role, [asdict(update) for update in updates])]

    def _logprobs(self, role: str, policy: Policy | None, sequences: list[Sequence]) -> list[Float32Array]:
        own = None if policy is None else policy.logprobs(self._passes.prepare(sequences))
        return self._split(role, own, sequences)

    def _split(self, role: str, own: torch.Tensor | None, sequences: list[Sequence]) -> list[Float32Array]:
        """The role's column, on every rank, by sequence."""
        offsets = response_offsets(sequences)
        return np.split(self.pools.column(role, own, offsets[-1]).cpu().numpy(), offsets[1:-1])
