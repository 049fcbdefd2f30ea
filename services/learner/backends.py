"""Back ends of the training, by `learner.backend`. A rank imports its own alone: Megatron's needs patches that the other must not have."""

from __future__ import annotations

from services.common.config.settings import Platform
from services.common.spec.job import JobSpec
from services.common.spec.learner import BackendName
from services.learner.training.backend import Backend


def open_backend(spec: JobSpec, platform: Platform) -> Backend:
    """Prepares this process for the job's back end and joins the other ranks.

    Raises:
        ConfigError: the ranks cannot be split as the spec says.
    """
    match spec.learner.backend:
        case BackendName.MEGATRON:
            from services.learner.megatron.platform import prepare

            prepare(platform)
            from services.learner.megatron.backend import MegatronBackend

            return MegatronBackend(spec, platform)
        case BackendName.FSDP2:
            from services.learner.fsdp2.backend import FSDP2Backend

            return FSDP2Backend(spec, platform)
