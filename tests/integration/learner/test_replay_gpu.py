"""Steps that a learner recorded on a CPU are trained again on a GPU: the same within rounding there, and the same bits each time."""

from __future__ import annotations

import pytest

from tests.integration.learner.platforms import ON_CPU, PLATFORM
from tests.integration.learner.test_replay import STEPS, Recorded, recorded, trained

__all__ = ["recorded", "trained"]
TOLERANCE = 1e-5
"""Of losses, gradient norms and entropies, relative to the largest of the job."""


@pytest.mark.skipif(ON_CPU, reason="MILLRACE_TEST_PLATFORM=cuda runs this on a GPU")
@pytest.mark.parametrize("redis_url", ["embedded"], indirect=True)
@pytest.mark.parametrize("recorded", ["float32"], indirect=True)
@pytest.mark.timeout(600)
def test_a_job_recorded_on_a_cpu_is_replayed_within_rounding_and_with_the_same_bits_each_time(
    recorded: Recorded,
) -> None:
    there = recorded.replay("--from", "0")[1]["versions"]
    here, again = (recorded.replay("--from", "0", platform=PLATFORM.value)[1]["versions"] for _ in range(2))
    assert len(here) == STEPS + 1
    assert all(version["proved"] for version in there)
    assert [version["digest"] for version in here] == [version["digest"] for version in again]
    assert here[0]["digest"] == there[0]["digest"]
    for figure in ("loss", "grad_norm", "entropy"):
        wanted, found = ([version["stats"][figure] for version in run[1:]] for run in (there, here))
        assert found == pytest.approx(wanted, rel=0.0, abs=TOLERANCE * max(map(abs, wanted))), figure
