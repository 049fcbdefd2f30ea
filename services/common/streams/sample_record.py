"""Record of a sample: a judged group with its texts, as the reward service keeps it and `GET /jobs/{id}/rollouts` shows it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from services.common.streams.types import FinishReason, Purpose, VerdictStatus


class _Kept(BaseModel):
    """Base of the records. What an earlier release did not write is null, or the field's default."""

    model_config = ConfigDict(extra="allow", frozen=True)


class SampledMessage(_Kept):
    """A message that the policy answers."""

    role: str = Field(description="`user` or `tool`; in the first turn also `system`.", examples=["tool"])
    content: str = Field(description="Its text; a long one has a mark in place of its middle.", examples=["3108"])


class SampledTurn(_Kept):
    """A turn of an episode."""

    turn: int = Field(description="Its number, from 1.", examples=[2])
    said: list[SampledMessage] = Field(
        default=[],
        description="What the policy answers: in the first turn the prompt, else what the environment said. The last 16 messages.",
    )
    text: str = Field(default="", description="The reply, shortened as a message is.", examples=["calc:37*84"])
    observed: int = Field(default=0, description="Tokens that were not sampled; 0 in the first turn.", examples=[9])
    sampled: int = Field(default=0, description="Tokens of the reply.", examples=[11])
    finish_reason: FinishReason = Field(default=FinishReason.STOP, description="`stop`, or `length`: cut off.")
    reward: float | None = Field(default=None, description="Of this turn alone, where the environment gave one.")


class SampledRollout(_Kept):
    """A rollout and its verdict."""

    text: str = Field(default="", description="Response without special tokens; a long one has a mark in its middle.")
    reward: float | None = Field(default=None, description="Null where the check failed.", examples=[1.0])
    accuracy: float | None = Field(default=None, description="0 to 1; null where there is no reward.", examples=[1.0])
    status: VerdictStatus = Field(default=VerdictStatus.SCORED, description="Outcome of the check.")
    verifier: str = Field(default="", description="Name of what judged it.", examples=["gsm8k"])
    detail: str = Field(default="", description="The verifier's own words.", examples=["41 is not 42"])
    finish_reason: FinishReason | None = Field(
        default=None,
        description="Why it ended. Of an episode also `turns`, no turn was left, and `context`, no room was left.",
    )
    min_policy_version: int | None = Field(default=None, description="Oldest version that sampled a token of it.")
    max_policy_version: int | None = Field(default=None, description="Newest version that sampled a token of it.")
    tokens: int | None = Field(default=None, description="Its tokens, observed ones included.", examples=[64])
    turns: list[SampledTurn] = Field(
        default=[], description="Of an episode, the last ones where there are too many; there only."
    )
    raw: str | None = Field(default=None, description="With `raw`: its tokens as text, special ones included.")


class SampleRecord(_Kept):
    """A group. Token ids, which the service keeps beside its texts, are not shown."""

    group_id: int | None = Field(default=None, description="Ordinal within job and purpose, from 0.", examples=[131])
    lineage: int | None = Field(default=None, description="Lineage of its task.")
    attempt: int | None = Field(default=None, description="1 on first issue.")
    purpose: Purpose | None = Field(default=None, description="`train` or `eval`.")
    prompt: str = Field(
        default="", description="The task's; with an environment what that says first.", examples=["2 + 3 ="]
    )
    ground_truth: str = Field(default="", description="The reference.", examples=["5"])
    data_source: str = Field(default="", description="The verifier is chosen by it.", examples=["openai/gsm8k"])
    environment: str | None = Field(
        default=None, description="Name of the environment that it was played in.", examples=["calculator"]
    )
    environment_seed: int | None = Field(default=None, description="Seed of its episodes.", examples=[17])
    rollouts: list[SampledRollout] = Field(default=[], description="In their order.")
    prompt_tokens: int | None = Field(default=None, description="Length of the prompt.")
    server: str = Field(default="", description="Rollout server that sampled it.", examples=["rollout-node1"])
    at: float | None = Field(default=None, description="Unix seconds at which it was judged.")
    raw_prompt: str | None = Field(default=None, description="With `raw`: the prompt's tokens as text.")
