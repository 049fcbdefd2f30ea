"""Automatic values of a spec: those that follow from the machine are settled when a job is accepted, so that its record has them.

A resumed or replayed job then computes as before, whatever machine it is on: element type and threads determine the rounding.
"""

from __future__ import annotations

from services.common.config.settings import Platform, Settings
from services.common.service.host import multiplies_bfloat16
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.gateway.admission.limits import Machine


def settle(spec: JobSpec, settings: Settings, machine: Machine) -> JobSpec:
    """The spec with its automatic values replaced: `model.dtype: auto`, `learner.threads_per_rank: 0`.

    `machine`: the gateway's, on which learner and engine usually run too, on the CPU platform.
    """
    model, learner = spec.model, spec.learner
    if model.dtype is DType.AUTO:
        native = settings.platform is not Platform.CPU or multiplies_bfloat16()
        model = model.model_copy(update={"dtype": DType.BFLOAT16 if native else DType.FLOAT32})
    if learner.threads_per_rank == 0:
        cores = machine.cores if spec.takes_turns else settings.learner_cores or machine.cores // 2
        learner = learner.model_copy(update={"threads_per_rank": max(1, cores // spec.world_size)})
    return spec.model_copy(update={"model": model, "learner": learner})
