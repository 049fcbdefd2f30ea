"""Metrics of the learner for Prometheus. Rank 0 writes them to files (multiprocess mode); the agent serves them on its own port.

A learner trains one job at a time, so only `millrace_learner_job_info` carries the job; dashboards join the others to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from services.common.jobs.fates import Fate
from services.common.jobs.step_record import StepRecord
from services.learner.groups.buffer import GroupBuffer

_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"millrace_learner_{name}", text, labels, multiprocess_mode="mostrecent")


def _histogram(name: str, text: str, buckets: Iterable[float] = _SECONDS) -> Histogram:
    return Histogram(f"millrace_learner_{name}", text, buckets=tuple(buckets))


JOB_INFO = _gauge("job_info", "1 for the job that this learner trains, or trained last.", "job_id")
RANKS = _gauge("ranks", "Ranks (devices) that the job is spread over.")
RANK_STARTS = Counter("millrace_learner_rank_starts", "Times the job's ranks were started, the first time included.")
STEPS = Counter("millrace_learner_steps", "Optimizer steps done.")
SKIPPED_STEPS = Counter(
    "millrace_learner_skipped_steps", "Steps that left the weights as they were: not_finite or no_tokens.", ["reason"]
)
STEP_SECONDS = _histogram("step_seconds", "From asking for a batch to the published version.")
WAIT_SECONDS = Counter(
    "millrace_learner_wait_seconds",
    "Time the learner stood idle, waiting for a batch or its turn.",
)
TRAIN_SECONDS = Counter("millrace_learner_train_seconds", "Time the ranks trained.")
PUBLISH_SECONDS = _histogram("weight_publish_seconds", "Time to gather, hash and announce a new version.")
TRAINED_TOKENS = Counter("millrace_learner_trained_tokens", "Response tokens trained.")
GENERATED_TOKENS = Counter("millrace_learner_generated_tokens", "Response tokens of training rollouts that arrived.")
WASTED_TOKENS = Counter("millrace_learner_wasted_tokens", "Response tokens of groups that were not trained.")
POLICY_VERSION = _gauge("policy_version", "Newest policy version published.")
POLICY_AGE = _histogram("policy_age_steps", "policy_age of each group when it was trained.", _AGES)
GROUPS = _gauge("groups", "Groups of the job so far, by fate.", "fate")
SLOTS = _gauge("slots", "The active-group budget: (max_off_policy_steps + 1) × groups_per_step.")
ACTIVE_GROUPS = _gauge("active_groups", "Groups issued and without a fate.")
READY_GROUPS = _gauge("ready_groups", "Informative groups that wait for a step.")
ACCEPT_RATE = _gauge("accept_rate_ratio", "Share of judged groups that are informative.")
JUDGE_SECONDS = _histogram("judge_seconds", "Time the verifiers took over a group.")
FAILURES_IN_A_ROW = _gauge(
    "failures_in_a_row_groups", "Groups that failed since the last one that was informative or degenerate."
)
DEAD_LETTERS = Counter("millrace_learner_dead_letters", "Scored entries that could not be used and were put aside.")
JOURNAL_BYTES = Counter("millrace_learner_journal_bytes", "Bytes appended to the journal.")
CHECKPOINT_SECONDS = _histogram("checkpoint_seconds", "From the copy of a checkpoint to its being durable.")
CHECKPOINT_HOLD_SECONDS = _histogram("checkpoint_hold_seconds", "Time that a checkpoint held the training: the copy.")
EVAL_ACCURACY = _gauge(
    "eval_accuracy_ratio", "Accuracy of the newest held-out evaluation: avg_at_k or pass_at_k.", "statistic"
)
EVAL_ROLLOUTS = _gauge(
    "eval_rollouts",
    "Rollouts of the newest held-out evaluation: judged, over_limit among them, or not_judged.",
    "outcome",
)
UNJUDGED_ROLLOUTS = Counter(
    "millrace_learner_unjudged_rollouts", "Training rollouts that arrived without a verdict: their verifier broke."
)

_CLIPPED = _gauge(
    "clipped_tokens_ratio",
    "Share of the step's tokens whose ratio was clipped: low, high, or dual by dual_clip.",
    "side",
)
_MASKED = _gauge(
    "masked_tokens_ratio",
    "Share of the step's tokens that the correction left out, by the sign of their advantage.",
    "advantage",
)
_VALUE = _gauge(
    "value", "Mean over the step's tokens of the critic's values, and of the returns that they predict.", "of"
)
_ROUTER_LOAD = _gauge(
    "router_load_ratio",
    "Of a mixture of experts: choices of the busiest or the least busy expert ÷ the mean, mean over layers; 0 for a dense model.",
    "expert",
)
_LENGTH = _gauge("response_length_tokens", "Response length in the newest step's batch: mean or p95.", "statistic")

STEP_GAUGES: Mapping[str, Gauge] = {
    "reward": _gauge("reward", "Mean reward of the rollouts judged since the step before, filtered ones included."),
    "accuracy": _gauge("accuracy_ratio", "Mean accuracy of the same rollouts."),
    "loss": _gauge("loss", "Loss of the newest step; NaN when it was not finite."),
    "entropy": _gauge("entropy_nats", "Mean entropy of the policy over the newest step's response tokens."),
    "grad_norm": _gauge("gradient_norm", "Gradient norm of the newest step before clipping; NaN when not finite."),
    "lr": _gauge("learning_rate", "Learning rate of the newest step."),
    "mismatch_kl_k1": _gauge("mismatch_kl_k1_nats", "Engine against learner: mean of −log ratio."),
    "mismatch_kl_k3": _gauge("mismatch_kl_k3_nats", "Engine against learner: mean of ratio − log ratio − 1."),
    "max_abs_logprob_difference": _gauge("logprob_difference_max_nats", "Largest |Δ log-prob|, engine to learner."),
    "effective_sample_share": _gauge("effective_sample_ratio", "Effective sample size of the ratios, as a share."),
    "truncated_share": _gauge("truncated_ratio", "Share of the newest step's responses that hit the length limit."),
    "clip_fraction_low": _CLIPPED.labels("low"),
    "clip_fraction_high": _CLIPPED.labels("high"),
    "clip_fraction_dual": _CLIPPED.labels("dual"),
    "mask_fraction_positive": _MASKED.labels("positive"),
    "mask_fraction_negative": _MASKED.labels("negative"),
    "importance_weight": _gauge("importance_weight", "Mean weight of the newest step's tokens by the correction."),
    "optimizer_steps": _gauge(
        "optimizer_steps", "Optimizer steps of the actor in the newest step, where a batch has several."
    ),
    "reference_kl": _gauge("reference_kl_nats", "KL of the policy to the reference, k3; 0 without a reference."),
    "kl_coefficient": _gauge("kl_coefficient", "What the KL to the reference is multiplied by; 0 without a reference."),
    "value_loss": _gauge("value_loss", "Loss of the critic in the newest step; 0 without a critic."),
    "explained_variance": _gauge(
        "explained_variance_ratio",
        "Share of the returns' variance that the critic's values explain; 0 without a critic.",
    ),
    "value_clip_fraction": _gauge("clipped_values_ratio", "Share of the step's tokens whose value was clipped."),
    "value_mean": _VALUE.labels("values"),
    "return_mean": _VALUE.labels("returns"),
    "critic_grad_norm": _gauge(
        "critic_gradient_norm", "The critic's gradient norm before clipping; NaN when not finite."
    ),
    "critic_lr": _gauge("critic_learning_rate", "The critic's learning rate of the newest step."),
    "router_load_max": _ROUTER_LOAD.labels("busiest"),
    "router_load_min": _ROUTER_LOAD.labels("least busy"),
    "router_entropy": _gauge(
        "router_entropy_nats", "Mean entropy of the routers of a mixture of experts; 0 for a dense model."
    ),
    "router_balance_loss": _gauge(
        "router_balance_loss", "Load-balancing loss of a mixture of experts, 1 for an even load; 0 for a dense model."
    ),
    "response_length_mean": _LENGTH.labels("mean"),
    "response_length_p95": _LENGTH.labels("p95"),
}
"""Figure of a step's record → its gauge, which stays 0 where the job has no such figure."""


class Stopwatch:
    """Adds a phase's seconds to its counter, one phase at a time; `tick`, called at regular intervals, updates the counter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counter: Counter | None = None
        self._counted_to = 0.0

    @contextmanager
    def phase(self, counter: Counter) -> Iterator[None]:
        """Adds the time of the `with` block to this counter."""
        self._counter, self._counted_to = counter, self._clock()
        try:
            yield
        finally:
            self.tick()
            self._counter = None

    def tick(self) -> None:
        """Adds the time since the last tick."""
        now = self._clock()
        if self._counter is not None:
            self._counter.inc(now - self._counted_to)
        self._counted_to = now


CLOCK = Stopwatch()
"""Stopwatch of WAIT_SECONDS and TRAIN_SECONDS."""

for _reason in ("not_finite", "no_tokens"):
    SKIPPED_STEPS.labels(_reason)  # Prometheus sees no increase in a counter that begins at 1


def observe_job(job_id: str, *, slots: int, ranks: int) -> None:
    """Sets the gauges of the job, and counts the start of its ranks."""
    JOB_INFO.labels(job_id).set(1)
    SLOTS.set(slots)
    RANKS.set(ranks)
    RANK_STARTS.inc()


def observe_step(record: StepRecord, ages: list[int]) -> None:
    """Counts a step from its record. A figure is None when it was not finite, or when no data for it existed."""
    STEPS.inc()
    STEP_SECONDS.observe(record.step_s)
    TRAINED_TOKENS.inc(record.trained_tokens)
    WASTED_TOKENS.inc(record.wasted_tokens)
    UNJUDGED_ROLLOUTS.inc(record.rollouts_not_judged)
    for age in ages:
        POLICY_AGE.observe(age)
    if record.skipped:
        SKIPPED_STEPS.labels("no_tokens" if record.loss_tokens == 0 else "not_finite").inc()
    figures = record.as_json()
    for name in STEP_GAUGES.keys() & figures.keys():
        STEP_GAUGES[name].set(math.nan if figures[name] is None else figures[name])


def observe_buffer(buffer: GroupBuffer) -> None:
    """Sets the gauges of groups that were issued."""
    CLOCK.tick()
    for fate in Fate:
        GROUPS.labels(fate.value).set(buffer.ledger.counts[fate])
    ACTIVE_GROUPS.set(len(buffer.ledger.active))
    READY_GROUPS.set(buffer.ready)
    FAILURES_IN_A_ROW.set(buffer.failures.count)
    ACCEPT_RATE.set(buffer.accept_rate.value)


def observe_evaluation(result: Mapping[str, Any]) -> None:
    """Sets the gauges of a held-out evaluation; the accuracies of one without answers change nothing."""
    EVAL_ROLLOUTS.labels("judged").set(result["rollouts_judged"])
    EVAL_ROLLOUTS.labels("over_limit").set(result["checks_over_limit"])
    EVAL_ROLLOUTS.labels("not_judged").set(result["rollouts_not_judged"])
    for statistic in ("avg_at_k", "pass_at_k"):
        if result[statistic] is not None:
            EVAL_ACCURACY.labels(statistic).set(result[statistic])
