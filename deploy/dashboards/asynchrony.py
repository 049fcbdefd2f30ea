"""How far sampling and training run apart, and who waits for whom."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board, median_and_p95, of_job, rate
from deploy.dashboards.panels import Query, buckets, graph

PHASES = {
    "publish": "millrace_learner_weight_publish_seconds",
    "fetch": "millrace_rollout_weight_fetch_seconds",
    "apply": "millrace_rollout_weight_apply_seconds",
}


def dashboard() -> Dashboard:
    """Policy age, slots, streams, idle times, weight sync."""
    return board(
        "Asynchrony",
        "Policy age, slots, streams, idle time and weight sync.",
        buckets(
            "Policy age",
            "policy_age of the groups at the moment they were trained: learner's version − oldest version in the group. "
            "It never exceeds max_off_policy_steps.",
            "suffix: steps",
            "millrace_learner_policy_age_steps",
        ),
        graph(
            "Slots",
            "The active-group budget, (max_off_policy_steps + 1) × groups_per_step, and what fills it: groups issued without a fate, "
            "and those of them that are judged, informative and ready for a step.",
            "short",
            Query(of_job("millrace_learner_slots"), "slots {{job_id}}"),
            Query(of_job("millrace_learner_active_groups"), "active {{job_id}}"),
            Query(of_job("millrace_learner_ready_groups"), "ready {{job_id}}"),
            width=12,
        ),
        graph(
            "Idle time",
            "Share of the time that the learner waits for a batch; that an engine has no rollout in flight; and that its server waits "
            "for tasks, which is a part of it. All low: well balanced.",
            "percentunit",
            Query("rate(millrace_learner_wait_seconds_total[$__rate_interval])", "learner {{instance}}"),
            Query(
                "clamp_min(1 - rate(millrace_rollout_busy_seconds_total[$__rate_interval]), 0)", "engine {{instance}}"
            ),
            Query("rate(millrace_rollout_idle_seconds_total[$__rate_interval])", "no tasks {{instance}}"),
            width=12,
            top=1,
        ),
        graph(
            "Stream depth",
            "Entries in the work streams of the active jobs, delivered ones included. A stage that grows is followed by the bottleneck.",
            "short",
            Query("max by (stage) (millrace_gateway_stream_entries)", "{{stage}}"),
            width=12,
        ),
        graph(
            "Weight sync",
            "Mean time of each phase: the learner gathers, hashes and announces; a server fetches and verifies while it samples on; "
            "the engine loads.",
            "s",
            *(Query(f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}", phase) for phase, metric in PHASES.items()),
        ),
        graph(
            "Pause per weight sync",
            "Time for which a server samples nothing, per new version.",
            "s",
            *median_and_p95("millrace_rollout_weight_pause_seconds"),
        ),
        graph(
            "Time paused",
            "Share of the time that a server stands still for new weights.",
            "percentunit",
            Query("rate(millrace_rollout_weight_pause_seconds_sum[$__rate_interval])", "{{instance}}"),
        ),
        graph(
            "Weights on the wire",
            "Payload bytes of weights that rollout servers received.",
            "Bps",
            Query(rate("millrace_rollout_weight_wire_bytes_total", "instance"), "{{instance}}"),
        ),
        graph(
            "Weight syncs",
            "New versions brought in, by outcome.",
            "ops",
            Query(rate("millrace_rollout_weight_syncs_total", "outcome"), "{{outcome}}"),
        ),
        graph(
            "Blocked by a full stream",
            "Share of the time that a service waits because the next stream is full: back-pressure.",
            "percentunit",
            Query(rate("millrace_rollout_blocked_seconds_total"), "rollout"),
            Query(rate("millrace_reward_blocked_seconds_total"), "reward"),
        ),
    )
