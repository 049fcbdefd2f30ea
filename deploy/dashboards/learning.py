"""Does the policy learn, and is the step sound."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board, of_job, rate
from deploy.dashboards.panels import Query, graph


def dashboard() -> Dashboard:
    """What each step says of itself."""
    return board(
        "Learning",
        "Reward, loss and the health of each step, by job.",
        graph(
            "Accuracy",
            "Training rollouts: every one judged since the step before. Held-out: avg@k and pass@k of the newest evaluation.",
            "percentunit",
            _of("accuracy_ratio", "training"),
            Query(of_job("millrace_learner_eval_accuracy_ratio"), "held-out {{statistic}} {{job_id}}"),
            top=1,
        ),
        graph("Reward", "Mean reward of every rollout judged since the step before.", "none", _of("reward", "reward")),
        graph(
            "Accept rate",
            "Share of judged groups that are informative: not all right and not all wrong. Dynamic sampling filters the others.",
            "percentunit",
            _of("accept_rate_ratio", "accept rate"),
            top=1,
        ),
        graph(
            "Loss",
            "Policy loss over the batch's response tokens. Its level says little; a jump or a gap (not finite) does.",
            "none",
            _of("loss", "loss"),
        ),
        graph(
            "Entropy",
            "Mean entropy over response tokens. A fall towards 0 is a policy that no longer explores.",
            "suffix: nats",
            _of("entropy_nats", "entropy"),
        ),
        graph(
            "Gradient norm",
            "Before clipping.",
            "none",
            _of("gradient_norm", "gradient norm"),
        ),
        graph(
            "Clip fractions",
            "Share of response tokens whose ratio was clipped, from below and from above.",
            "percentunit",
            Query(of_job("millrace_learner_clipped_tokens_ratio"), "{{side}} {{job_id}}"),
        ),
        graph(
            "Mismatch KL",
            "Engine's log-probs against the learner's, mean of ratio − log ratio − 1 (k3) and of −log ratio (k1). Grows with policy_age; "
            "large at age 0 means that engine and learner disagree about the same weights.",
            "suffix: nats",
            _of("mismatch_kl_k3_nats", "k3"),
            _of("mismatch_kl_k1_nats", "k1"),
        ),
        graph(
            "Largest log-prob difference",
            "Largest |Δ log-prob| between engine and learner in the batch.",
            "suffix: nats",
            _of("logprob_difference_max_nats", "largest"),
        ),
        graph(
            "Response length",
            "Tokens per response of the batch.",
            "suffix: tokens",
            Query(of_job("millrace_learner_response_length_tokens"), "{{statistic}} {{job_id}}"),
        ),
        graph(
            "Truncated",
            "Share of the batch's responses that hit rollout_max_tokens.",
            "percentunit",
            _of("truncated_ratio", "truncated"),
        ),
        graph(
            "Effective sample size",
            "Of the importance ratios, as a share of the tokens: 1 is on-policy.",
            "percentunit",
            _of("effective_sample_ratio", "effective"),
            top=1,
        ),
        graph("Learning rate", "AdamW's rate, warm-up included.", "none", _of("learning_rate", "learning rate")),
        graph(
            "Steps",
            "Optimizer steps, and those among them that left the weights as they were.",
            "ops",
            Query(rate("millrace_learner_steps_total"), "steps"),
            Query(rate("millrace_learner_skipped_steps_total", "reason"), "skipped: {{reason}}"),
        ),
        graph("Policy version", "Newest version published.", "none", _of("policy_version", "version")),
    )


def _of(metric: str, legend: str) -> Query:
    return Query(of_job(f"millrace_learner_{metric}"), f"{legend} {{{{job_id}}}}")
