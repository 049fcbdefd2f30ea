"""Metrics of the reward service (Prometheus). Verifier names are those installed on the server: a bounded label."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.common.streams.types import VerdictStatus

VERDICTS = Counter("millrace_reward_verdicts_total", "Verdicts, by status and verifier.", ["status", "verifier"])
ACCURACIES = Counter(
    "millrace_reward_verdict_accuracies_total",
    "Sum of the accuracies of verdicts that have one, by verifier.",
    ["verifier"],
)
VERIFIED_TOKENS = Counter("millrace_reward_verified_tokens_total", "Response tokens of rollouts that were judged.")
CHECK_SECONDS = Histogram(
    "millrace_reward_check_seconds",
    "Wall-clock seconds of one check, in its worker.",
    ["verifier"],
    buckets=(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
JUDGE_SECONDS = Histogram(
    "millrace_reward_judge_seconds",
    "Wall-clock seconds from a group's arrival to its last verdict.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)
WORKER_RESTARTS = Counter(
    "millrace_reward_worker_restarts_total",
    "Worker processes replaced, by reason: timeout, slow, crowded (its checks left processes), died or recycled.",
    ["reason"],
)
GROUPS = Counter(
    "millrace_reward_groups_total", "Groups handled, by result: judged, passed_on or dead_letter.", ["result"]
)
GROUPS_IN_FLIGHT = Gauge("millrace_reward_in_flight_groups", "Groups delivered to this server and not yet sent on.")
CHECKS_QUEUED = Gauge("millrace_reward_queued_checks", "Checks waiting for a worker.")
BLOCKED_SECONDS = Counter(
    "millrace_reward_blocked_seconds_total", "Seconds spent waiting because the next stream was full."
)

JUDGE_REQUESTS = Counter(
    "millrace_reward_judge_requests_total",
    "Requests to judge endpoints, by result: answered, limited (429), unavailable, timeout or refused.",
    ["endpoint", "result"],
)
JUDGE_RETRIES = Counter("millrace_reward_judge_retries_total", "Requests to judge endpoints made again.", ["endpoint"])
JUDGE_CACHE_HITS = Counter(
    "millrace_reward_judge_cache_hits_total", "Responses whose grade was known: no request was made.", ["endpoint"]
)
JUDGE_UNREADABLE = Counter(
    "millrace_reward_judge_unreadable_answers_total", "Answers of judges without a score of the scale.", ["endpoint"]
)
JUDGE_TOKENS = Counter(
    "millrace_reward_judge_tokens_total", "Tokens that judge endpoints counted, by kind: prompt or completion.", ["endpoint", "kind"]
)  # fmt: skip
JUDGE_REQUEST_SECONDS = Histogram(
    "millrace_reward_judge_request_seconds",
    "Wall-clock seconds of one request to a judge endpoint.",
    ["endpoint"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
MODEL_BATCH_SECONDS = Histogram(
    "millrace_reward_model_batch_seconds",
    "Wall-clock seconds of one batch of a reward model.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
MODEL_TOKENS = Counter("millrace_reward_model_tokens_total", "Tokens that reward models scored, without padding.")
MODEL_STARTS = Counter(
    "millrace_reward_model_starts_total", "Processes of reward models, by result: loaded or failed.", ["result"]
)
MODEL_BYTES = Gauge("millrace_reward_model_resident_bytes", "Memory of the processes of all reward models.")
MODEL_QUEUED = Gauge("millrace_reward_model_queued_responses", "Responses waiting for a reward model.")

for _result in ("loaded", "failed"):
    MODEL_STARTS.labels(_result)
for _reason in ("timeout", "slow", "crowded", "died", "recycled"):
    WORKER_RESTARTS.labels(_reason)  # a counter that begins at 1 has no increase
for _result in ("judged", "passed_on", "dead_letter"):
    GROUPS.labels(_result)

_seen: set[str] = set()


def observe_verdict(status: VerdictStatus, verifier: str, accuracy: float | None = None) -> None:
    """Counts a verdict. A verifier's first verdict creates its counters of all statuses, at 0."""
    if verifier not in _seen:
        _seen.add(verifier)
        ACCURACIES.labels(verifier)
        for each in VerdictStatus:
            VERDICTS.labels(each, verifier)
    VERDICTS.labels(status, verifier).inc()
    if accuracy is not None:
        ACCURACIES.labels(verifier).inc(accuracy)
