"""Builder of a rank's trainer from the job spec."""

from __future__ import annotations

from pathlib import Path

from services.common.config.settings import Platform
from services.common.spec.job import JobSpec
from services.learner.algorithms.losses import make_loss
from services.learner.megatron.trainer import MegatronTrainer


def build_trainer(spec: JobSpec, model_dir: Path, platform: Platform) -> MegatronTrainer:
    """This rank's trainer; call `platform.prepare` first."""
    return MegatronTrainer(model_dir, spec, platform, make_loss(spec.algorithm))
