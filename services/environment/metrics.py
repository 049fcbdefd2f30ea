"""Prometheus metrics of the environment service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

EPISODES_IN_FLIGHT = Gauge("millrace_environment_in_flight_episodes", "Episodes that have a place.")
STEP_SECONDS = Histogram(
    "millrace_environment_step_seconds", "Wall-clock seconds of one answer of an environment.", buckets=_BUCKETS
)
FAILURES = Counter(
    "millrace_environment_failures_total",
    "Episodes that failed, by reason: config, no_place, unavailable, timeout, died, killed, bad_observation or error.",
    ["reason"],
)
