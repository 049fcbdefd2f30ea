"""Prometheus metrics of the rollout service."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_seconds = partial(Histogram, buckets=_BUCKETS)

TOKENS = Counter("millrace_rollout_generated_tokens_total", "Response tokens sampled.")
ROLLOUTS = Counter("millrace_rollout_rollouts_total", "Rollouts sampled to their end.")
GROUPS = Counter(
    "millrace_rollout_groups_total",
    "Groups handled, by outcome: sampled, closed_early (fewer rollouts at the deadline), failed, dead_letter or stale_lineage.",
    ["outcome"],
)
GENERATE_SECONDS = _seconds(
    "millrace_rollout_generate_seconds", "Wall-clock seconds from a group's start to its last token."
)
GROUPS_IN_FLIGHT = Gauge("millrace_rollout_in_flight_groups", "Groups delivered to this server and not yet sent on.")
REQUESTS_IN_FLIGHT = Gauge("millrace_rollout_in_flight_requests", "Rollouts being sampled.")
POLICY_VERSION = Gauge("millrace_rollout_policy_version", "Policy version that samples the next token; -1 for none.")
LINEAGE = Gauge("millrace_rollout_lineage", "Lineage of that version; -1 for none.")
EPISODES = Counter(
    "millrace_rollout_episodes_total", "Episodes with an environment, by outcome: whole or failed.", ["outcome"]
)
TURNS = Histogram(
    "millrace_rollout_episode_turns",
    "Turns that the policy sampled in a whole episode.",
    buckets=(1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
)
EPISODE_FAILURES = Counter(
    "millrace_rollout_episode_failures_total",
    "Episodes that failed, by reason: the environment service's own, silent (no answer of it) or lost (it was not reached any more).",
    ["reason"],
)
EPISODE_SECONDS = Counter(
    "millrace_rollout_episode_seconds_total",
    "Time that episodes spent waiting for their environment's answers, and being sampled, each episode's added up.",
    ["spent"],
)
WEIGHT_SYNCS = Counter(
    "millrace_rollout_weight_syncs_total",
    "Attempts to bring in a new version, by outcome: activated, fetch_failed or activate_failed.",
    ["outcome"],
)
FETCH_SECONDS = _seconds("millrace_rollout_weight_fetch_seconds", "Fetch of a version, while generation goes on.")
APPLY_SECONDS = _seconds("millrace_rollout_weight_apply_seconds", "Load of a version in the engine.")
PAUSE_SECONDS = _seconds("millrace_rollout_weight_pause_seconds", "Time without generation per new version.")
WIRE_BYTES = Counter("millrace_rollout_weight_wire_bytes_total", "Payload bytes of weights that travelled here.")
IDLE_SECONDS = Counter(
    "millrace_rollout_idle_seconds_total", "Time ready to sample, with no group to work on: waiting for tasks."
)
BLOCKED_SECONDS = Counter(
    "millrace_rollout_blocked_seconds_total", "Time spent waiting because the next stream was full."
)
BUSY_SECONDS = Counter("millrace_rollout_busy_seconds_total", "Time with at least one rollout being sampled.")
DEVICES = Gauge("millrace_rollout_devices", "Devices (on CPUs: engines) that the engine runs on; 0 without one.")
ENGINE_STARTS = Counter("millrace_rollout_engine_starts_total", "Engines started since the process began.")
CHAT_REQUESTS = Counter(
    "millrace_rollout_chat_requests_total",
    "Chat requests, by outcome: stop, length, left (the client went), failed, or why it was refused.",
    ["outcome"],
)
CHAT_TOKENS = Counter("millrace_rollout_chat_tokens_total", "Tokens sampled for chats; not counted as response tokens.")
CHAT_IN_FLIGHT = Gauge("millrace_rollout_in_flight_chats", "Chat answers being sampled.")
CHAT_FIRST_TOKEN_SECONDS = _seconds(
    "millrace_rollout_chat_first_token_seconds",
    "Wall-clock seconds from a chat's place in the lane to its first token.",
)

for _outcome in ("sampled", "closed_early", "failed", "dead_letter", "stale_lineage"):
    GROUPS.labels(_outcome)  # a counter that begins at 1 has no increase
for _outcome in ("whole", "failed"):
    EPISODES.labels(_outcome)
for _spent in ("environment", "engine"):
    EPISODE_SECONDS.labels(_spent)
for _outcome in ("activated", "fetch_failed", "activate_failed"):
    WEIGHT_SYNCS.labels(_outcome)


class BusyClock:
    """Clock of BUSY_SECONDS: `note` is called before the number of rollouts in flight changes, and at every heartbeat."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted_at = clock()

    def note(self, requests: int) -> None:
        """Counts the time since the last note, if `requests`, the rollouts in flight since then, is not 0."""
        now = self._clock()
        if requests:
            BUSY_SECONDS.inc(now - self._noted_at)
        self._noted_at = now


BUSY = BusyClock()
