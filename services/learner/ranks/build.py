"""From the job spec to a trainer."""

from __future__ import annotations

from pathlib import Path

from services.common.config.settings import Platform
from services.common.spec import JobSpec
from services.learner.algorithms.losses import make_loss
from services.learner.megatron.settings import TrainerSettings
from services.learner.megatron.trainer import MegatronTrainer, OldLogprobs


def build_trainer(spec: JobSpec, model_dir: Path, platform: Platform) -> MegatronTrainer:
    """This rank's trainer; `platform.prepare` comes first."""
    return MegatronTrainer(model_dir, trainer_settings(spec, platform), make_loss(spec.algorithm))


def proximal_policy(spec: JobSpec) -> OldLogprobs:
    """Whose log-probs are the proximal policy's: the engine's, or the trainer's own where the loss corrects for the difference."""
    return "trainer" if spec.algorithm.wants_trainer_proximal else "inference"


def trainer_settings(spec: JobSpec, platform: Platform) -> TrainerSettings:
    """Sections `learner` and `model` as the ranks take them."""
    learner = spec.learner
    return TrainerSettings(
        platform=platform,
        tensor_parallel_size=learner.tensor_parallel_size,
        pipeline_parallel_size=learner.pipeline_parallel_size,
        use_distributed_optimizer=learner.use_distributed_optimizer,
        max_tokens_per_micro_batch=learner.max_tokens_per_micro_batch,
        packing=learner.packing,
        lr=learner.lr,
        lr_warmup_steps=learner.lr_warmup_steps,
        adam_beta1=learner.adam_beta1,
        adam_beta2=learner.adam_beta2,
        adam_eps=learner.adam_eps,
        weight_decay=learner.weight_decay,
        clip_grad=learner.clip_grad,
        dtype=spec.model.dtype.value,
        publish_dtype=spec.model.dtype.value,
        fp32_output_layer=spec.model.fp32_output_layer,
        seed=learner.seed,
        temperature=spec.rollout.temperature,
    )
