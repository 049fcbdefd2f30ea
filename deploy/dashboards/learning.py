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
            _of("gradient_norm", "actor"),
            _of("critic_gradient_norm", "critic"),
        ),
        graph(
            "Clip fractions",
            "Share of response tokens whose ratio was clipped, from below, from above and by dual_clip; and of the critic's values.",
            "percentunit",
            Query(of_job("millrace_learner_clipped_tokens_ratio"), "{{side}} {{job_id}}"),
            _of("clipped_values_ratio", "values"),
        ),
        graph(
            "Importance correction",
            "Share of response tokens that the correction left out, by the sign of their advantage. 0 without one.",
            "percentunit",
            Query(of_job("millrace_learner_masked_tokens_ratio"), "{{advantage}} {{job_id}}"),
        ),
        graph(
            "Importance weight",
            "Mean weight that the correction gives to a token: near 1 where engine and learner agree. 0 without a correction.",
            "none",
            _of("importance_weight", "weight"),
        ),
        graph(
            "Reference KL",
            "KL of the policy to the reference, k3. Grows as the policy leaves it; an adaptive coefficient keeps it near kl_target. "
            "0 without a reference.",
            "suffix: nats",
            _of("reference_kl_nats", "KL"),
        ),
        graph(
            "KL coefficient",
            "What the KL to the reference is multiplied by, in the loss or in the reward.",
            "none",
            _of("kl_coefficient", "coefficient"),
        ),
        graph(
            "Value loss",
            "Loss of the critic. Falls in its first steps; 0 without a critic.",
            "none",
            _of("value_loss", "value loss"),
        ),
        graph(
            "Explained variance",
            "Share of the returns' variance that the critic's values explain: near 1 is a critic that predicts, below 0 one that misleads. "
            "0 without a critic.",
            "percentunit",
            _of("explained_variance_ratio", "explained"),
        ),
        graph(
            "Values and returns",
            "Means over response tokens of the critic's values and of the returns that they predict.",
            "none",
            Query(of_job("millrace_learner_value"), "{{of}} {{job_id}}"),
        ),
        graph(
            "Load of experts",
            "Choices of the busiest and of the least busy expert ÷ the mean over experts, mean over layers: 1 is an even load, 0 an expert "
            "that no position chooses. 0 for a dense model.",
            "none",
            Query(of_job("millrace_learner_router_load_ratio"), "{{expert}} {{job_id}}"),
        ),
        graph(
            "Router entropy and balance",
            "Mean entropy of the routers, nats, and their load-balancing loss, 1 for an even load. 0 for a dense model.",
            "none",
            _of("router_entropy_nats", "entropy"),
            _of("router_balance_loss", "balance loss"),
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
        graph(
            "Learning rate",
            "AdamW's rate, warm-up and schedule included.",
            "none",
            _of("learning_rate", "actor"),
            _of("critic_learning_rate", "critic"),
        ),
        graph(
            "Steps",
            "Steps, and those among them that left the weights as they were.",
            "ops",
            Query(rate("millrace_learner_steps_total"), "steps"),
            Query(rate("millrace_learner_skipped_steps_total", "reason"), "skipped: {{reason}}"),
        ),
        graph(
            "Optimizer steps",
            "Of the actor in the newest step, where a batch has several: mini-batches × ppo_epochs. 0 while only the critic is trained.",
            "none",
            _of("optimizer_steps", "optimizer steps"),
        ),
        graph("Policy version", "Newest version published.", "none", _of("policy_version", "version")),
    )


def _of(metric: str, legend: str) -> Query:
    return Query(of_job(f"millrace_learner_{metric}"), f"{legend} {{{{job_id}}}}")
