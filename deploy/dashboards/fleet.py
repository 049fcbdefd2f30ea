"""Who is there, how new its weights are, how often it died, what it needs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board, rate
from deploy.dashboards.panels import Query, graph, rows

SERVICES = 'job=~"millrace-.*"'


def dashboard() -> Dashboard:
    """Workers, versions, restarts, memory."""
    return board(
        "Fleet",
        "Workers, policy versions, restarts and memory.",
        graph(
            "Workers",
            "Workers whose heartbeat is fresh, by kind.",
            "short",
            Query("max by (kind) (millrace_gateway_workers)", "{{kind}}"),
        ),
        rows(
            "Workers and their states",
            "Each worker with its present state.",
            Query("max by (worker, kind, state) (millrace_gateway_worker_info) == 1"),
            {"worker": "Worker", "kind": "Kind", "state": "State"},
            width=8,
        ),
        rows(
            "Releases",
            "The release that each process runs: several at once only during an upgrade.",
            Query("count by (job, version) (millrace_build_info)"),
            {"job": "Service", "version": "Release", "Value": "Processes"},
            width=8,
        ),
        graph(
            "Policy versions",
            "The version that each rollout server samples with, and the newest that each learner published.",
            "none",
            Query("millrace_rollout_policy_version", "rollout {{instance}}"),
            Query("millrace_learner_policy_version", "learner {{instance}}"),
        ),
        graph(
            "Versions behind",
            "How many policy versions a rollout server is behind its job's newest.",
            "none",
            Query("max by (worker) (millrace_gateway_worker_lag_versions)", "{{worker}}"),
        ),
        graph(
            "Rollouts in flight",
            "Rollouts that each engine samples at once.",
            "short",
            Query("millrace_rollout_in_flight_requests", "{{instance}}"),
        ),
        graph(
            "Restarts of services",
            "How often each process was started again within the last hour.",
            "short",
            Query(f"sum by (job) (changes(process_start_time_seconds{{{SERVICES}}}[1h]))", "{{job}}"),
        ),
        graph(
            "Restarts within services",
            "Within the last hour: learner ranks and engines started, verifier processes replaced, by reason.",
            "short",
            Query("sum(increase(millrace_learner_rank_starts_total[1h]))", "ranks"),
            Query("sum(increase(millrace_rollout_engine_starts_total[1h]))", "engines"),
            Query("sum by (reason) (increase(millrace_reward_worker_restarts_total[1h]))", "verifier: {{reason}}"),
        ),
        graph(
            "Trackers",
            "Steps and evaluations that trackers took within the last five minutes, and batches that failed and are sent again.",
            "short",
            Query("sum by (tracker) (increase(millrace_gateway_tracker_points_total[5m]))", "{{tracker}}"),
            Query("sum by (tracker) (increase(millrace_gateway_tracker_failures_total[5m]))", "failed: {{tracker}}"),
        ),
        graph(
            "Targets up",
            "Processes that Prometheus reaches.",
            "short",
            Query(f"sum by (job) (up{{{SERVICES}}})", "{{job}}"),
        ),
        graph(
            "Memory",
            "Each process with all below it (engine, ranks, verifiers), shared pages counted once.",
            "bytes",
            Query("millrace_process_tree_memory_bytes", "{{job}} {{instance}}"),
        ),
        graph(
            "Memory of Redis",
            "What Redis uses for its data. With `noeviction` it refuses writes at its limit.",
            "bytes",
            Query("max(millrace_gateway_redis_memory_bytes)", "redis"),
        ),
        graph(
            "CPU",
            "Cores that the services' own processes use; those below them are not in it.",
            "short",
            Query(rate(f"process_cpu_seconds_total{{{SERVICES}}}", "job"), "{{job}}"),
        ),
    )
