"""Models of the roles beside the actor, which `critic.path` and `reference.path` name; a role without a path begins with the actor's.

Every role is spread over ranks as the actor is, and takes the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.config.settings import Settings
from services.common.errors import ModelError, Problem
from services.common.models.directory import FIELD, ModelInfo, resolve_model, split_problems
from services.common.spec.job import JobSpec

ROLES = ("critic", "reference")
"""Sections of the roles beside the actor."""


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
        """The directories that the spec names. Raises ModelError as `resolve_model`, with the role's field."""
        named = {role: _resolved(role, path, settings) for role, path in named_models(spec).items()}
        return cls(actor=resolve_model(spec.model.path, settings), **named)


def _resolved(role: str, path: str, settings: Settings) -> Path:
    with naming(f"{role}.path"):
        return resolve_model(path, settings)


def named_models(spec: JobSpec) -> dict[str, str]:
    """The path of every role that has a model of its own, by section."""
    sections = {role: getattr(spec, role) for role in ROLES}
    return {role: section.path for role, section in sections.items() if section is not None and section.path}


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Raises problems of `model.path` again, as problems of this field."""
    try:
        yield
    except ModelError as error:
        problems = (Problem(field, item.message) if item.field == FIELD else item for item in error.problems)
        raise ModelError(*problems) from error


def check_role(role: str, info: ModelInfo, actor: ModelInfo | None, spec: JobSpec) -> None:
    """Checks that a role's model can be spread over the ranks and, where the actor is known, takes its tokens and lengths.

    Raises:
        ModelError: a line for each setting that does not fit; it names the role's path too.
    """
    if problems := [*split_problems(info, spec, whose=f"{role}.path's"), *_token_problems(role, info, actor, spec)]:
        raise ModelError(*problems)


def _token_problems(role: str, info: ModelInfo, actor: ModelInfo | None, spec: JobSpec) -> Iterator[Problem]:
    if actor is None:
        return
    field, own, others = f"{role}.path", info.vocab_size, actor.vocab_size
    if own != others:
        yield Problem(field, f"has {own} vocabulary entries and {FIELD} {others}: both must take the same tokens")
    positions = actor.max_position_embeddings
    longest, limit = min(spec.model.max_model_len or positions, positions), info.max_position_embeddings
    if longest > limit:
        name = "model.max_model_len" if spec.model.max_model_len else FIELD
        yield Problem(field, f"has {limit} positions and {name} {longest}: set model.max_model_len to {limit} at most")
