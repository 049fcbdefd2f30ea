"""What becomes of the groups, and what environments, verifiers, judges and reward models do."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board, median_and_p95, of_job, rate
from deploy.dashboards.panels import TOKENS_PER_S, Panel, Query, buckets, graph

VERDICTS = "millrace_reward_verdicts_total"
TIMEOUTS = f'{VERDICTS}{{status="timeout"}}'


def dashboard() -> Dashboard:
    """Groups, episodes, scorers, dead letters, journal."""
    return board(
        "Data",
        "Groups by fate, environments, verifiers, judges, reward models, dead letters, journal and checkpoints.",
        *_groups(),
        *_episodes(),
        *_scorers(),
        *_kept(),
    )


def _groups() -> tuple[Panel, ...]:
    """What becomes of them."""
    return (
        graph(
            "Groups by fate",
            "Groups of the job so far. Together with the active ones they sum to the groups issued.",
            "short",
            Query(of_job("millrace_learner_groups"), "{{fate}} {{job_id}}"),
            width=16,
            stacked=True,
        ),
        graph(
            "Groups sampled",
            "Groups that rollout servers handled, by outcome.",
            "ops",
            Query(rate("millrace_rollout_groups_total", "outcome"), "{{outcome}}"),
        ),
        graph(
            "Groups judged",
            "Groups that reward services handled, by result; passed on: those that could not be sampled.",
            "ops",
            Query(rate("millrace_reward_groups_total", "result"), "{{result}}"),
        ),
    )


def _episodes() -> tuple[Panel, ...]:
    """Rollouts that take turns with an environment."""
    return (
        buckets(
            "Turns per rollout",
            "Turns that the policy sampled in a whole episode.",
            "suffix: turns",
            "millrace_rollout_episode_turns",
            width=8,
        ),
        buckets(
            "Answers of environments",
            "Wall-clock time of one answer of an environment in its process.",
            "s",
            "millrace_environment_step_seconds",
            width=8,
        ),
        graph(
            "Where episodes spend their time",
            "Episodes that wait for their environment's answer, and episodes that are sampled, at once on average. Where the first is "
            "large, environments are the bottleneck.",
            "short",
            Query(rate("millrace_rollout_episode_seconds_total", "spent"), "{{spent}}"),
            width=16,
            stacked=True,
        ),
        graph(
            "Episodes",
            "Episodes that ended, by outcome; and those that have a place at an environment server now.",
            "short",
            Query(rate("millrace_rollout_episodes_total", "outcome"), "{{outcome}} per s"),
            Query("sum(millrace_environment_in_flight_episodes)", "in flight"),
        ),
        graph(
            "Failed episodes",
            "Episodes that failed, by cause. Such a rollout has no reward; its group goes on without it, or is issued again.",
            "ops",
            Query(rate("millrace_rollout_episode_failures_total", "reason"), "{{reason}}"),
        ),
    )


def _scorers() -> tuple[Panel, ...]:
    """Verifiers, judges, reward models."""
    return (
        graph(
            "Verifier latency",
            "Wall-clock time of one check in its worker process, by verifier.",
            "s",
            *median_and_p95("millrace_reward_check_seconds", "verifier"),
        ),
        graph("Verdicts", "Checks made, by status.", "ops", Query(rate(VERDICTS, "status"), "{{status}}")),
        graph(
            "Verifier timeouts",
            "Share of checks that were killed at their limit, by verifier. A timeout is a status of its own, not a wrong answer.",
            "percentunit",
            Query(
                f"{rate(TIMEOUTS, 'verifier')} / {rate(VERDICTS, 'verifier')}",
                "{{verifier}}",
            ),
        ),
        graph(
            "Time to judge a group",
            "From a group's arrival at the reward service to its last verdict.",
            "s",
            *median_and_p95("millrace_reward_judge_seconds"),
        ),
        graph(
            "Checks waiting",
            "Checks that wait for a verifier process, and groups in the reward services' hands.",
            "short",
            Query("sum(millrace_reward_queued_checks)", "checks waiting"),
            Query("sum(millrace_reward_in_flight_groups)", "groups in flight"),
        ),
        graph(
            "Requests to judges",
            "Requests to judge endpoints, by result; limited: the endpoint asked for a pause, and has the request again later.",
            "reqps",
            Query(rate("millrace_reward_judge_requests_total", "endpoint, result"), "{{endpoint}} {{result}}"),
        ),
        graph(
            "Judge latency",
            "Wall-clock time of one request to a judge endpoint.",
            "s",
            *median_and_p95("millrace_reward_judge_request_seconds", "endpoint"),
        ),
        graph(
            "Reward models",
            "Tokens that reward models score, without padding.",
            TOKENS_PER_S,
            Query(rate("millrace_reward_model_tokens_total"), "scored"),
        ),
        graph(
            "Waiting for a reward model",
            "Responses that wait for a place in a batch of a reward model.",
            "short",
            Query("sum(millrace_reward_model_queued_responses)", "responses"),
        ),
        graph(
            "Memory of reward models",
            "Of the processes of all reward models.",
            "bytes",
            Query("sum(millrace_reward_model_resident_bytes)", "resident"),
        ),
    )


def _kept() -> tuple[Panel, ...]:
    """Dead letters, journal, checkpoints, and the time that sampling takes."""
    return (
        graph(
            "Dead letters",
            "Entries of the active jobs that could not be used, by the stage that they came from. Each has its reason with it.",
            "short",
            Query("max by (stage) (millrace_gateway_dead_letters)", "{{stage}}"),
        ),
        graph(
            "Time to sample a group",
            "From a group's start to its last token.",
            "s",
            *median_and_p95("millrace_rollout_generate_seconds"),
        ),
        graph(
            "Journal",
            "Bytes appended to the write-ahead journal.",
            "Bps",
            Query(rate("millrace_learner_journal_bytes_total"), "journal"),
        ),
        graph(
            "Checkpoints",
            "Mean time to save one.",
            "s",
            Query(
                "sum(millrace_learner_checkpoint_seconds_sum) / sum(millrace_learner_checkpoint_seconds_count)", "mean"
            ),
        ),
        graph(
            "Room for journals and checkpoints",
            "Free and whole size of the learner's volume.",
            "bytes",
            Query("millrace_learner_disk_free_bytes", "free {{instance}}"),
            Query("millrace_learner_disk_size_bytes", "size {{instance}}"),
            width=16,
        ),
    )
