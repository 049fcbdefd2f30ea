"""The learner's Prometheus metrics. Rank 0 writes them to files (multiprocess mode); the agent serves them."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from services.learner.intake import Intake
from services.learner.ledger import Fate

_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

STEPS = Counter("millrace_learner_steps", "Optimizer steps done.")
STEP_SECONDS = Histogram(
    "millrace_learner_step_seconds", "From asking for a batch to the published version.", buckets=_SECONDS
)
WAIT_SECONDS = Counter("millrace_learner_wait_seconds", "Time the learner stood idle, waiting for a batch.")
TRAIN_SECONDS = Counter("millrace_learner_train_seconds", "Time the ranks trained.")
TRAINED_TOKENS = Counter("millrace_learner_trained_tokens", "Response tokens trained.")
GENERATED_TOKENS = Counter("millrace_learner_generated_tokens", "Response tokens of training rollouts that arrived.")
WASTED_TOKENS = Counter("millrace_learner_wasted_tokens", "Response tokens of groups that were not trained.")
POLICY_VERSION = Gauge(
    "millrace_learner_policy_version", "Newest policy version published.", multiprocess_mode="mostrecent"
)
POLICY_AGE = Histogram(
    "millrace_learner_policy_age_steps", "policy_age of each group when it was trained.", buckets=_AGES
)
GROUPS = Gauge(
    "millrace_learner_groups", "Groups of the job so far, by fate.", ["fate"], multiprocess_mode="mostrecent"
)
ACTIVE_GROUPS = Gauge(
    "millrace_learner_active_groups", "Groups issued and without a fate.", multiprocess_mode="mostrecent"
)
READY_GROUPS = Gauge(
    "millrace_learner_ready_groups", "Informative groups that wait for a step.", multiprocess_mode="mostrecent"
)
ACCEPT_RATE = Gauge(
    "millrace_learner_accept_rate_ratio", "Share of judged groups that are informative.", multiprocess_mode="mostrecent"
)
STEP_VALUE = Gauge(
    "millrace_learner_step_value", "Figures of the newest step, by name.", ["name"], multiprocess_mode="mostrecent"
)
JUDGE_SECONDS = Histogram("millrace_learner_judge_seconds", "Time the verifiers took over a group.", buckets=_SECONDS)
JOURNAL_BYTES = Counter("millrace_learner_journal_bytes", "Bytes appended to the journal.")
CHECKPOINT_SECONDS = Histogram("millrace_learner_checkpoint_seconds", "Time to save a checkpoint.", buckets=_SECONDS)

STEP_VALUES = (
    "reward", "accuracy", "loss", "entropy", "grad_norm", "mismatch_kl_k1", "mismatch_kl_k3", "clip_fraction_low",
    "clip_fraction_high", "effective_sample_share", "max_abs_logprob_difference", "response_length_mean",
    "response_length_p95", "truncated_share", "sync_s", "pause_s", "lr",
)  # fmt: skip


def observe_step(record: dict[str, Any], ages: list[int]) -> None:
    """Counts a step from its record."""
    STEPS.inc()
    STEP_SECONDS.observe(record["step_s"])
    WAIT_SECONDS.inc(record["wait_s"])
    TRAIN_SECONDS.inc(record["train_s"])
    TRAINED_TOKENS.inc(record["trained_tokens"])
    WASTED_TOKENS.inc(record["wasted_tokens"])
    for age in ages:
        POLICY_AGE.observe(age)
    for name in STEP_VALUES:
        if record.get(name) is not None:
            STEP_VALUE.labels(name).set(record[name])


def observe_intake(intake: Intake) -> None:
    """Sets the gauges of what is on its way."""
    for fate in Fate:
        GROUPS.labels(fate.value).set(intake.ledger.counts[fate])
    ACTIVE_GROUPS.set(len(intake.ledger.active))
    READY_GROUPS.set(intake.ready)
    ACCEPT_RATE.set(intake.accept_rate.value)
