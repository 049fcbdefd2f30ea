"""The gateway's checks of a new job, but for the scripted model's weights: those are one tensor, which no trial would take for a model."""

from __future__ import annotations

from services.common.models import check_parallel_sizes, inspect_model, resolve_model
from services.gateway.checks import JobChecks

MODEL = "scripted"
"""Its registered name."""


class ScriptedChecks(JobChecks):
    """Looks at the scripted model's shape alone, and at every other model as the gateway does."""

    def model(self, seconds: float) -> None:
        """As `JobChecks.model`."""
        if self._spec.model.path != MODEL:
            super().model(seconds)
            return
        check_parallel_sizes(inspect_model(resolve_model(self._spec.model.path, self._settings)), self._spec)
