"""Record of one optimizer step: a line of the job's history, an element of `GET /jobs/{id}/metrics`, and an event."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class StepRecord(BaseModel):
    """Figures of one step.

    Further fields are means over the step's unmasked response tokens: `entropy`, mismatch figures, and those of the loss function.
    A figure that is not finite is null, and so is a field that an earlier release did not write.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    step: int = Field(description="Optimizer steps of the job, this one included.", examples=[17])
    lineage: int = Field(default=1, description="Lineage in which it was trained.")
    at: float | None = Field(default=None, description="Unix seconds of its end.")
    policy_version: int | None = Field(default=None, description="Version that it published.", examples=[17])
    weights_digest: str | None = Field(
        default=None, description="Digest of that version; null when the step was trained again from the journal."
    )
    reward: float | None = Field(
        default=None, description="Mean over every rollout judged since the step before, filtered ones included."
    )
    accuracy: float | None = Field(default=None, description="Mean over the same rollouts.", examples=[0.41])
    rollouts_judged: int | None = Field(default=None, description="How many they are.")
    rollouts_not_judged: int = Field(default=0, description="Rollouts whose verifier broke.")
    checks_over_limit: int | None = Field(
        default=None, description="Judged rollouts whose check went beyond its limit: they count as wrong."
    )
    trained_reward: float | None = Field(default=None, description="Mean over the batch's judged rollouts.")
    trained_accuracy: float | None = Field(default=None, description="Mean over the same rollouts.")
    accept_rate: float | None = Field(default=None, description="Expected share of informative groups, 0 to 1.")
    groups_trained: int | None = Field(default=None, description="Groups in the batch.")
    groups_judged: int | None = Field(default=None, description="Groups judged since the step before.")
    policy_age_mean: float | None = Field(default=None, description="Of the batch's groups, optimizer steps.")
    policy_age_max: int | None = Field(default=None, description="The oldest group of the batch, optimizer steps.")
    response_length_mean: float | None = Field(default=None, description="Of the batch's rollouts, tokens.")
    response_length_p95: float | None = Field(default=None, description="Of the batch's rollouts, tokens.")
    truncated_share: float | None = Field(default=None, description="Rollouts of the batch cut by a length limit.")
    turns_mean: float | None = Field(
        default=None, description="Turns of an episode, mean over the batch's; null without episodes."
    )
    generated_tokens_per_s: float | None = Field(default=None, description="Since the step before.")
    wasted_tokens: int = Field(default=0, description="Tokens of groups that are not trained on.")
    trained_tokens: int = Field(default=0, description="Response tokens of the batch that the policy sampled.")
    trained_tokens_per_s: float | None = Field(default=None, description="Over `step_s`.")
    rollout_servers: int | None = Field(
        default=None, description="Servers that sampled the groups that came since the step before."
    )
    rollout_busy_s: float | None = Field(
        default=None, description="Seconds in which such a server sampled a group or more, summed over the servers."
    )
    groups_sampled: int | None = Field(default=None, description="Those groups, held-out ones included.")
    generate_s_mean: float | None = Field(default=None, description="Of those groups, from start to last token.")
    wait_s: float | None = Field(default=None, description="Time that the learner waited for the batch.")
    train_s: float | None = Field(default=None, description="Time of the ranks.")
    step_s: float = Field(default=0.0, description="From the request for a batch to the published version.")
    sync_s: float | None = Field(default=None, description="Fetch and pause of the slowest server's last weight sync.")
    pause_s: float | None = Field(
        default=None, description="Generation pause of the slowest server's last weight sync."
    )
    groups: dict[str, int] | None = Field(default=None, description="Groups issued, active, and by fate.")
    optimizer_step: int | None = Field(default=None, description="The trainer's own count.")
    loss_tokens: int | None = Field(default=None, description="Unmasked response tokens.")
    sequences: int | None = Field(default=None, description="Sequences in the batch.")
    micro_batches: int | None = Field(default=None, description="Micro-batches of each rank.")
    skipped: str = Field(default="", description="Why the weights were left unchanged; empty when they were not.")
    loss: float | None = Field(
        default=None,
        description="Mean over the batch's unmasked response tokens; null too while only the critic is trained.",
    )
    grad_norm: float | None = Field(default=None, description="Before clipping; null as the loss is.")
    lr: float | None = Field(default=None, description="Learning rate of the step.")
    optimizer_steps: int | None = Field(
        default=None,
        description="The actor's optimizer steps in this step, where a batch has several; 0 while only the critic is trained.",
    )
    reference_kl: float | None = Field(
        default=None,
        description="KL of the policy to the reference, k3, nats; only with a reference.",
        examples=[0.012],
    )
    kl_coefficient: float | None = Field(
        default=None, description="What that KL was multiplied by in this step; null where it is only measured."
    )
    value_loss: float | None = Field(
        default=None, description="The critic's loss, mean over the same tokens; only with a critic."
    )
    explained_variance: float | None = Field(
        default=None,
        description="1 − var(return − value) / var(return): 1 for a perfect critic, 0 for a constant; only with a critic.",
    )
    critic_grad_norm: float | None = Field(default=None, description="The critic's, before clipping.")
    critic_lr: float | None = Field(default=None, description="The critic's learning rate of the step.")
    router_load_max: float | None = Field(
        default=None,
        description="Choices of the busiest expert ÷ the mean over experts, mean over layers; only of a mixture of experts.",
    )
    router_load_min: float | None = Field(default=None, description="The same of the least busy expert.")
    router_entropy: float | None = Field(
        default=None, description="Mean entropy of the routers over positions and layers, nats."
    )
    router_balance_loss: float | None = Field(
        default=None, description="Load-balancing loss, mean over layers; 1 for an even load."
    )
    padding_share: float | None = Field(default=None, description="Computed positions that hold no token, 0 to 1.")
    record_digest: str | None = Field(default=None, description="Digest of the journal record of its batch.")
    replayed: bool = Field(default=False, description="Trained again from the journal after a restart.")

    def as_json(self) -> dict[str, Any]:
        """JSON values of the fields that were set."""
        return self.model_dump(mode="json", exclude_unset=True)

    def line(self, steps: int | None = None) -> str:
        """One line for people; a dash for what the step lacks. `steps`: of the job.

        Example: `step  17/200  reward 0.412  accuracy 0.412  trained 0.500  loss -0.0021  grad 1.3  accept 0.64  age 0.8  gen 812 tok/s …`
        """
        count = f"{self.step}/{steps}" if steps else str(self.step)
        width = 2 * len(str(steps)) + 1 if steps else 5
        return (
            f"step {count:>{width}}  reward {number(self.reward, '.3f')}  accuracy {number(self.accuracy, '.3f')}"
            f"  trained {number(self.trained_reward, '.3f')}  loss {number(self.loss, '.4f')}  grad {number(self.grad_norm, '.2f')}"
            f"  accept {number(self.accept_rate, '.2f')}  age {number(self.policy_age_mean, '.1f')}"
            f"  gen {number(self.generated_tokens_per_s, '.0f')} tok/s"
            f"  train {number(self.trained_tokens_per_s, '.0f')} tok/s  sync {number(self.sync_s, '.3f')} s"
            + (f"  skipped: {self.skipped}" if self.skipped else "")
        )


def number(value: object, form: str) -> str:
    """The value in this format; a dash for what is no number."""
    return format(value, form) if isinstance(value, int | float) and not isinstance(value, bool) else "-"
