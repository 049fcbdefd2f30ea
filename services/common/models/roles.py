"""Model directories of a job's roles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.config.settings import Settings
from services.common.models.directory import resolve_model
from services.common.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class RoleModels:
    """Hugging Face directories that the roles begin with."""

    actor: Path
    critic: Path | None = None
    """None: the actor's, or there is no critic."""
    reference: Path | None = None
    """None: the actor's, or there is no reference."""

    @classmethod
    def of(cls, spec: JobSpec, settings: Settings) -> Self:
        """The directories that the spec names. Raises ModelError as `resolve_model`."""
        critic = None if spec.critic is None else spec.critic.path
        reference = None if spec.reference is None else spec.reference.path
        return cls(
            actor=resolve_model(spec.model.path, settings),
            critic=None if critic is None else resolve_model(critic, settings),
            reference=None if reference is None else resolve_model(reference, settings),
        )
