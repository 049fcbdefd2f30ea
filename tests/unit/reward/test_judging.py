"""Groups, their verdicts, and what people see of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.spec.reward import RewardSpec
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from services.reward.dispatch import Dispatch
from services.reward.pool.pool import Pool
from services.reward.samples import GROUP_CHARS, sample, shorten
from services.reward.session import without_text

pytestmark = pytest.mark.asyncio(loop_scope="module")


def group(*texts: str, **changes: Any) -> RolloutGroup:
    values: dict[str, Any] = {
        "job_id": "job", "lineage": 2, "group_id": 17, "attempt": 1, "purpose": Purpose.TRAIN, "prompt": (Message("user", "6 × 7 ="),),
        "data_source": "openai/gsm8k", "ground_truth": "42", "extra_info": {}, "group_size": len(texts), "temperature": 1.0,
        "max_tokens": 16, "min_policy_version": 4, "timeout_s": 600.0,
    }  # fmt: skip
    spans = (VersionSpan(0, 4), VersionSpan(1, 6))
    rollouts = tuple(Rollout(bytes(8), bytes(8), text, FinishReason.LENGTH, spans) for text in texts)
    return RolloutGroup(Task(**(values | changes)), "rollout-1", bytes(12), rollouts, 0.25)


async def judge(pool: Pool, group: RolloutGroup, spec: RewardSpec) -> ScoredGroup:
    """The group with its verdicts, in a pool that is open."""
    return await Dispatch(spec, pool, Settings()).judge(group)


async def test_each_rollout_has_its_verdict_in_order(pool: Pool) -> None:
    scored = await judge(pool, group("#### 42", "#### 41", "42"), RewardSpec())
    assert [verdict.reward for verdict in scored.verdicts] == [1.0, 0.0, 1.0]
    assert {verdict.verifier for verdict in scored.verdicts} == {"gsm8k"}
    assert scored.judge_s > 0


async def test_the_jobs_choice_of_verifier_holds(pool: Pool) -> None:
    spec = RewardSpec(verifiers={"openai/gsm8k": "dapo_math"})
    scored = await judge(pool, group("Answer: 42", "#### 42"), spec)
    assert [verdict.reward for verdict in scored.verdicts] == [1.0, -1.0]


@pytest.mark.usefixtures("installed_here")
async def test_the_jobs_limit_holds(pool: Pool) -> None:
    spec = RewardSpec(verifiers={"*": "odd_sleep"}, timeout_s=0.3)
    scored = await judge(pool, group("60", "0"), spec)
    assert [verdict.status for verdict in scored.verdicts] == [VerdictStatus.TIMEOUT, VerdictStatus.SCORED]


async def test_without_a_verifier_every_verdict_fails_and_says_why(pool: Pool) -> None:
    scored = await judge(pool, group("42", "41", data_source="unheard_of"), RewardSpec())
    assert [(verdict.status, verdict.reward) for verdict in scored.verdicts] == [(VerdictStatus.FAILED, None)] * 2
    assert "data_source 'unheard_of'" in scored.verdicts[0].detail


async def test_the_learner_gets_everything_but_the_text(pool: Pool) -> None:
    scored = await judge(pool, group("#### 42", "#### 41"), RewardSpec())
    sent = without_text(scored)
    assert [rollout.text for rollout in sent.group.rollouts] == ["", ""]
    assert sent.verdicts == scored.verdicts
    assert sent.group.task == scored.group.task
    assert [rollout.token_ids for rollout in sent.group.rollouts] == [bytes(8), bytes(8)]


def scored(*texts: str, **changes: Any) -> ScoredGroup:
    verdicts = tuple(Verdict(VerdictStatus.TIMEOUT, None, None, "math", "late") for _ in texts)
    return ScoredGroup(group(*texts, **changes), verdicts, 0.1)


async def test_a_sample_tells_people_what_they_need() -> None:
    prompt = (Message("system", "Be brief."), Message("user", "6 × 7 ="))
    shown = json.loads(json.dumps(sample(scored("forty-two", prompt=prompt))))
    assert shown["prompt"] == "system: Be brief.\n\nuser: 6 × 7 ="
    assert (shown["group_id"], shown["purpose"], shown["lineage"], shown["server"]) == (17, "train", 2, "rollout-1")
    assert (shown["ground_truth"], shown["data_source"]) == ("42", "openai/gsm8k")
    assert shown["rollouts"] == [
        {
            "text": "forty-two", "reward": None, "accuracy": None, "status": "timeout", "verifier": "math", "detail": "late",
            "finish_reason": "length", "min_policy_version": 4, "max_policy_version": 6, "tokens": 2,
        }
    ]  # fmt: skip


@pytest.mark.parametrize("rollouts", [1, 8, 256, 1024])
async def test_a_sample_of_long_texts_stays_small(rollouts: int) -> None:
    shown = sample(scored(*["x" * 100_000] * rollouts, prompt=(Message("user", "y" * 1_000_000),)))
    assert sum(len(rollout["text"]) for rollout in shown["rollouts"]) < GROUP_CHARS + 50 * rollouts
    assert len(shown["prompt"]) < 10_000


async def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shorten("beginning" + "." * 1000 + "the end", 20) == "beginning. […996 characters…] ...the end"
    assert shorten("short", 5) == "short"
