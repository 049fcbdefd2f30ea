"""Every status of a verifier has a counter from its first verdict on: one that begins at 1 has no increase, and no alert."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.common.streams.types import VerdictStatus
from services.reward import metrics


def count(status: VerdictStatus, verifier: str) -> float | None:
    return REGISTRY.get_sample_value(
        "millrace_reward_verdicts_total", {"status": status.value, "verifier": verifier}
    )  # fmt: skip


def test_a_verifiers_other_statuses_begin_at_zero() -> None:
    name = "of-this-test"
    assert count(VerdictStatus.TIMEOUT, name) is None
    metrics.observe_verdict(VerdictStatus.SCORED, name)
    assert [count(status, name) for status in VerdictStatus] == [1, 0, 0]
    metrics.observe_verdict(VerdictStatus.TIMEOUT, name)
    assert [count(status, name) for status in VerdictStatus] == [1, 1, 0]


def test_accuracies_add_up_where_there_are_any() -> None:
    name = "of-another-test"
    for status, accuracy in ((VerdictStatus.SCORED, 1.0), (VerdictStatus.SCORED, 0.25), (VerdictStatus.FAILED, None)):
        metrics.observe_verdict(status, name, accuracy)
    assert REGISTRY.get_sample_value("millrace_reward_verdict_accuracies_total", {"verifier": name}) == 1.25
