"""Which settings may be changed when recorded steps are rerun: those of the loss and of the optimizer, and no other."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from services.common.differences import differences
from services.common.errors import ConfigError
from services.common.spec import JobSpec
from services.common.spec.job import describe_errors

SECTIONS = ("algorithm", "learner")
RECORDED = ("algorithm.filter_groups_", "learner.steps")
"""Beginnings of those in the sections that decide what is recorded: which groups a batch holds, and how many batches there are."""


def changed_spec(recorded: JobSpec, document: dict[str, Any]) -> tuple[JobSpec, dict[str, Any]]:
    """The spec in a changed document, and path → new value of every setting that differs.

    Raises:
        ConfigError: an unknown key or a wrong value (names the field), a setting that recorded data cannot follow, or no change at all.
    """
    try:
        changed = JobSpec.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(f"--set {line}" for line in describe_errors(error))) from error
    before, after = recorded.model_dump(mode="json"), changed.model_dump(mode="json")
    changes = {path: value for path, _, value in differences(before, after)}
    for path in changes:
        if path.partition(".")[0] not in SECTIONS or path.startswith(RECORDED):
            raise ConfigError(
                f"--set {path}: decides what is sampled or which groups a step gets, and that is recorded; "
                "a replay can change the loss (algorithm.…) and the optimizer (learner.…)"
            )
    if not changes:
        raise ConfigError("--set: every value is the recorded one; there is nothing to compare")
    return changed, changes
