"""Trainer of one rank: every rank of a job makes the same calls, in the same order.

sequences ─► plan ─► micro-batches ─► forward_backward_func ─► gradients, summed ─► AdamW ─► export (rank 0) | save
                                           └─ loss_fn on the last stage
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.pipeline_parallel import get_forward_backward_func

from services.common.checkpoints.manifest import EXPORT, WrittenFile
from services.common.config.settings import Platform
from services.common.spec.choices import ProximalPolicy
from services.common.spec.job import JobSpec
from services.common.spec.learner import LearnerSpec
from services.common.streams.types import Float32Array
from services.learner.algorithms.losses import LossFunction, LossInputs, mismatch_metrics
from services.learner.groups.sequence import Sequence
from services.learner.megatron.background import BackgroundWriter
from services.learner.megatron.batch import MicroBatch, collate, padded_length, response_offsets, shared_tokens
from services.learner.megatron.collectives import any_rank, gather_json
from services.learner.megatron.logprobs import token_logprobs
from services.learner.megatron.micro_batches import MicroBatchPlan, plan_micro_batches, plan_shared_prompts
from services.learner.megatron.model import build_policy, load_weights, torch_dtype
from services.learner.megatron.optimizer import Optimizer, learning_rate
from services.learner.megatron.parallel import join
from services.learner.megatron.platform import device_of, seed_all, seed_tensor_parallel
from services.learner.megatron.state import RankState
from services.learner.megatron.stats import StepStats
from services.learner.megatron.tally import Tally
from services.learner.megatron.weights import Exporter, write_directory

log = logging.getLogger(__name__)

OnLogits = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The last stage's function of a micro-batch and its logits: returns the summed loss, and its number of tokens."""


class MegatronTrainer:
    """One rank's part of the policy in training. Call `platform.prepare` before this module is imported."""

    def __init__(self, model_dir: Path, spec: JobSpec, platform: Platform, loss_fn: LossFunction) -> None:
        """Joins the other ranks and loads the model; ConfigError if they do not divide, or it cannot be trained."""
        self._model_dir = Path(model_dir)
        self._spec = spec
        self._loss_fn = loss_fn
        self.layout = join(spec.learner, platform)
        self.device = device_of(platform)
        seed_all(spec.learner.seed + self.layout.rank)
        if spec.learner.sequence_parallel:
            seed_tensor_parallel(spec.learner.seed)
        self._policy = build_policy(self._model_dir, spec, self.layout)
        self._optimizer = Optimizer(spec.learner, torch_dtype(spec.model.dtype), self._policy.model)
        self._exporter = Exporter(self._policy, self.layout, self.device)
        self._state = RankState(spec, platform, self.layout, self._policy.chunk, self._optimizer)
        self._writer = BackgroundWriter()
        self.step = 0
        """Optimizer steps so far, including the skipped ones."""

    def train(self, sequences: list[Sequence]) -> StepStats:
        """One optimizer step on the global batch; every rank gets the whole batch. Its order only affects rounding.

        The loss is the sum of token losses over the global batch divided by its number of unmasked tokens. If the loss or the gradient is
        not finite, weights and optimizer stay unchanged, and the stats give the reason.
        """
        self.step += 1
        plan, micro_batches = self._prepare(sequences)
        global_tokens = sum(int(s.loss_mask.sum()) for s in sequences)
        counting = sum(bool(s.loss_mask.any()) for s in sequences)
        blank = StepStats(
            step=self.step,
            loss=0.0,
            grad_norm=0.0,
            lr=learning_rate(self._spec.learner, self.step),
            tokens=global_tokens,
            sequences=len(sequences),
            micro_batches=len(micro_batches),
            padding=_padding(sequences, plan, self._spec.learner),
        )
        if global_tokens == 0:
            return replace(blank, skipped="no token to train on")
        tally = Tally()
        self._policy.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(micro_batches, partial(self._loss, tally, (global_tokens, counting)), forward_only=False)
        metrics = tally.means(self.layout, self.device, global_tokens)
        loss = metrics.pop("loss")
        grad_norm = self._optimizer.prepare()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        skipped = ""
        # Every rank has the same sums. The explicit agreement holds even if their reduction differs, so no rank steps alone.
        if any_rank(not finite, self.device) or not self._optimizer.step(self.step):
            skipped = f"loss {loss} and gradient norm {grad_norm} are not both finite"
            log.warning("step %d left the weights as they are: %s", self.step, skipped)
        return replace(blank, loss=loss, grad_norm=grad_norm, skipped=skipped, metrics=metrics)

    @torch.no_grad()
    def logprobs(self, sequences: list[Sequence]) -> list[Float32Array]:
        """The log-prob of each response token under the current weights, float32 [R] per sequence, on every rank."""
        _, micro_batches = self._prepare(sequences)
        offsets = response_offsets(sequences)
        values = torch.zeros(offsets[-1], dtype=torch.float32, device=self.device)
        self._run(micro_batches, partial(self._keep_logprobs, values), forward_only=True)
        if dist.get_world_size() > 1:
            dist.all_reduce(values)  # only one rank writes each element, so the sum is exact
        return np.split(values.cpu().numpy(), offsets[1:-1])

    def finite(self) -> bool:
        """Whether every parameter of every rank is finite; the same on all."""
        mine = all(bool(torch.isfinite(parameter).all()) for parameter in self._policy.chunk.parameters())
        return not any_rank(not mine, self.device)

    def export(self, *, copy: bool = True) -> dict[str, torch.Tensor] | None:
        """Hugging Face name → CPU tensor in `model.dtype`, always with `lm_head.weight`, on rank 0; None elsewhere.

        Without `copy` they may be the parameters themselves, which the next step changes.
        """
        return self._exporter.gather(torch_dtype(self._spec.model.dtype), copy=copy)

    def save(self, folder: Path, *, export: bool = False) -> None:
        """Copies every rank's part of a checkpoint to host memory, and begins to write it into the directory, which all ranks share.

        With `export`, rank 0 also writes `hf/`, a Hugging Face directory: weights in the initial model's dtypes, config, tokenizer.
        Returns when the copy is made; with it the state needs twice its host memory. `saved` reports the end of the writing.
        """
        state = self._state.copy(self.step)
        weights = self._exporter.gather(None) if export else None

        def write() -> list[WrittenFile]:
            folder.mkdir(parents=True, exist_ok=True)
            exported = [] if weights is None else write_directory(weights, self._model_dir, folder, EXPORT)
            return [state.write(folder), *exported]

        self._writer.start(write)

    def saved(self, *, wait: bool = False) -> list[dict[str, Any]] | None:
        """Every rank's report of the last `save` (see BackgroundWriter), the same on all; None while any rank is writing."""
        if wait:
            self._writer.join()
        reports = gather_json(self._writer.report, self.device)
        return None if None in reports else reports

    def load(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> None:
        """Restores the state of a `save`, bit for bit on a CPU. Options and errors are those of `RankState.load`."""
        self.step = self._state.load(Path(folder), optimizer=optimizer, rng=rng)
        dist.barrier()

    def load_weights(self, folder: Path, *, hugging_face: bool) -> None:
        """Starts at step 0 from the weights of a checkpoint or of a Hugging Face directory.

        Raises:
            ConfigError: the checkpoint was saved with another layout, or is incomplete; or the directory's tensors do not fit the model.
        """
        if hugging_face:
            load_weights(self._policy, folder)
            self._optimizer.follow_weights()
        else:
            self._state.load(folder, optimizer=False, rng=False)
        self.step = 0
        dist.barrier()

    def _prepare(self, sequences: list[Sequence]) -> tuple[list[list[MicroBatchPlan]], list[MicroBatch]]:
        """The plan for all data-parallel ranks, and this one's micro-batches."""
        learner, ranks = self._spec.learner, self.layout.dp_size
        shared, max_tokens = learner.shared_prompts, learner.max_tokens_per_micro_batch
        multiple = learner.row_multiple
        if shared:
            plan = plan_shared_prompts(sequences, ranks, max_tokens=max_tokens, multiple=multiple)
        else:
            plan = plan_micro_batches(
                sequences, ranks, max_tokens=max_tokens, packing=learner.packing, multiple=multiple
            )
        offsets = response_offsets(sequences)
        return plan, [
            collate(sequences, rows, offsets, self.device, shared=shared, multiple=multiple)
            for rows in plan[self.layout.dp_rank]
        ]

    def _run(self, micro_batches: list[MicroBatch], on_logits: OnLogits, *, forward_only: bool) -> None:
        """Runs Megatron's schedule over the micro-batches: pipelined where there are stages; gradients are reduced at the end."""

        def forward_step(batches: Iterator[MicroBatch], _: object) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(batches)

            def loss_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
                return *on_logits(batch, logits[0]), {}

            return self._policy.forward(batch), loss_of

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._policy.model],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.tokens.shape[1] for batch in micro_batches),
            micro_batch_size=1,  # stages send shapes with the tensors; this and `seq_length` are ignored
            forward_only=forward_only,
        )

    def _token_logprobs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = get_tensor_model_parallel_group() if self.layout.tp_size > 1 else None
        return token_logprobs(logits, batch.targets, temperature=self._spec.rollout.temperature, group=group)

    def _loss(
        self, tally: Tally, totals: tuple[int, int], batch: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trainer_logprobs, entropy = self._token_logprobs(batch, logits)
        trainers = self._spec.algorithm.proximal_policy is ProximalPolicy.TRAINER
        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            # With one optimizer step per batch, these are the weights at the start of the step.
            old_logprobs=trainer_logprobs.detach() if trainers else batch.inference_logprobs,
            inference_logprobs=batch.inference_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
            global_tokens=totals[0],
            global_sequences=totals[1],
            entropy=entropy,
        )
        token_loss, metrics = self._loss_fn(inputs)
        detached = trainer_logprobs.detach()
        own = {"loss": token_loss, "entropy": entropy, **mismatch_metrics(detached, batch.inference_logprobs)}
        tally.add(metrics | own, batch.loss_mask)
        tally.add_difference(detached - batch.inference_logprobs, batch.loss_mask)
        loss = torch.where(batch.loss_mask, token_loss, token_loss.new_zeros(())).sum()
        return loss, batch.loss_mask.sum().int()

    def _keep_logprobs(
        self, values: torch.Tensor, batch: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, _ = self._token_logprobs(batch, logits)
        if self.layout.reports_losses:
            real = batch.offsets >= 0
            values[batch.offsets[real]] = logprobs[real]
        return logprobs.new_zeros(()), batch.loss_mask.sum().int()


def _padding(sequences: list[Sequence], plan: list[list[MicroBatchPlan]], learner: LearnerSpec) -> float:
    """Share of the computed positions that hold no token."""
    real = computed = 0
    for rows in (rows for rank in plan for rows in rank):
        lengths = [
            shared_tokens(sequences, row) if learner.shared_prompts else sum(sequences[i].row_len for i in row)
            for row in rows
        ]
        if learner.shared_prompts:
            lengths = [sum(lengths)]
        real += sum(lengths)
        computed += (len(lengths) or 1) * padded_length(max([1, *lengths]), learner.row_multiple)
    return 1.0 - real / computed
