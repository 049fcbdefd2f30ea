"""Is it working, and is it worth its machines."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board, median_and_p95, of_job, rate
from deploy.dashboards.panels import TOKENS_PER_S, Query, graph, number


def dashboard() -> Dashboard:
    """Throughput, reward, jobs, devices."""
    return board(
        "Overview",
        "Throughput, reward, jobs and devices of the whole system.",
        number(
            "Jobs running",
            "Jobs that a learner trains now.",
            "short",
            Query('max(millrace_gateway_jobs{state="running"})'),
        ),
        number("Jobs queued", "Jobs that wait for a learner.", "short", Query("max(millrace_gateway_queued_jobs)")),
        number(
            "Jobs stalled",
            "Jobs whose next step waits for something that does not come; the job's `cause` names it.",
            "short",
            Query('max(millrace_gateway_jobs{state="stalled"})'),
        ),
        number(
            "Alerts firing",
            "Alert rules of deploy/prometheus/rules that fire now.",
            "short",
            Query('count(ALERTS{alertname=~"Millrace.*", alertstate="firing"}) or vector(0)'),
        ),
        number(
            "Steps", "Optimizer steps done by the present jobs.", "short", Query("sum(millrace_learner_steps_total)")
        ),
        number(
            "Accuracy",
            "Mean accuracy of the rollouts judged since the step before, filtered ones included.",
            "percentunit",
            Query(of_job("millrace_learner_accuracy_ratio"), "{{job_id}}"),
        ),
        graph(
            "Tokens per second",
            "Response tokens on their way: sampled by the engines (evaluation included), judged, trained, and not trained because their "
            "group was degenerate, stale or failed.",
            TOKENS_PER_S,
            Query(rate("millrace_rollout_generated_tokens_total"), "generated"),
            Query(rate("millrace_reward_verified_tokens_total"), "verified"),
            Query(rate("millrace_learner_trained_tokens_total"), "trained"),
            Query(rate("millrace_learner_wasted_tokens_total"), "wasted"),
            width=12,
        ),
        graph(
            "Reward and accuracy",
            "Means over every rollout judged since the step before, filtered groups included.",
            "none",
            Query(of_job("millrace_learner_reward"), "reward {{job_id}}"),
            Query(of_job("millrace_learner_accuracy_ratio"), "accuracy {{job_id}}"),
            width=12,
        ),
        graph(
            "Job states",
            "All jobs that the gateway knows, by state.",
            "short",
            Query("max by (state) (millrace_gateway_jobs)", "{{state}}"),
            stacked=True,
        ),
        graph(
            "Devices busy",
            "Devices that compute, on average over the interval: learner ranks that train, and engines with a rollout in flight; "
            "against those that there are. On CPUs a device is a rank or an engine.",
            "short",
            Query(
                "sum(rate(millrace_learner_train_seconds_total[$__rate_interval]) * on (instance) millrace_learner_ranks)",
                "learner busy",
            ),
            Query("sum(millrace_learner_ranks)", "learner"),
            Query(
                "sum(rate(millrace_rollout_busy_seconds_total[$__rate_interval]) * on (instance) millrace_rollout_devices)",
                "rollout busy",
            ),
            Query("sum(millrace_rollout_devices)", "rollout"),
        ),
        graph(
            "Step time",
            "From asking for a batch to the published version.",
            "s",
            *median_and_p95("millrace_learner_step_seconds"),
        ),
        graph(
            "Chats",
            "Tokens sampled for people who talk to a policy, in the lane behind training.",
            TOKENS_PER_S,
            Query(rate("millrace_rollout_chat_tokens_total"), "chat tokens"),
        ),
        graph(
            "Gateway requests",
            "HTTP requests answered, by status.",
            "reqps",
            Query(rate("millrace_gateway_requests_total", "status"), "{{status}}"),
        ),
        graph(
            "Gateway latency",
            "Time from a request to the end of its answer; event streams are left out.",
            "s",
            *median_and_p95("millrace_gateway_request_seconds"),
        ),
    )
