"""Steps whose loss or gradient was not finite: they leave the weights as they were, and too many in a row end the job."""

from __future__ import annotations

from services.common.errors import ConfigError, MillraceError
from services.learner.context import JobContext
from services.learner.megatron.stats import StepStats

MOST_IN_A_ROW = 3


class NotFinite(MillraceError):  # noqa: N818  what the matter is
    """The job cannot go on: its weights are those of the last good step."""


async def require_finite_weights(job: JobContext, source: str) -> None:
    """Refuses weights that have just been loaded, before anything is sampled with them.

    Args:
        job: its ranks hold them.
        source: the field or file that they come from.

    Raises:
        ConfigError: a tensor has values that are not finite; names it.
    """
    if await job.ranks.finite():
        return
    weights = await job.ranks.weights()
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    raise ConfigError(f"{source} has values that are not finite: {broken[0] if broken else 'a parameter'}")


def notice_skip(job: JobContext, stats: StepStats) -> None:
    """Counts a step that was skipped for a loss or gradient that is not finite; any other begins anew. The same in replay."""
    not_finite = bool(stats.skipped) and stats.tokens > 0
    job.skipped_in_a_row = job.skipped_in_a_row + 1 if not_finite else 0


def require_finite(job: JobContext) -> None:
    """Ends a job that has skipped too many steps in a row, a recovered one too.

    Raises:
        NotFinite: the last MOST_IN_A_ROW steps were skipped.
    """
    if job.skipped_in_a_row >= MOST_IN_A_ROW:
        raise NotFinite(
            f"loss or gradient norm was not finite in {job.skipped_in_a_row} steps in a row, the last {job.step}: "
            f"the weights are those of step {job.step - job.skipped_in_a_row}"
        )
