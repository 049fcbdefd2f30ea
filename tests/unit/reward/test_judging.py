"""Groups, their verdicts, and what people see of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.spec.reward import RewardSpec, RubricSpec
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
from tests.unit.reward.conftest import PoolMaker

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
            "token_ids": [0, 0],
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


BOTH: dict[str, Any] = {
    "rubrics": {
        "both": RubricSpec(verifier_function=["gsm8k", "format"], verifier_weight=[1.0, 0.5], accuracy_of="gsm8k")
    },
    "config": {"format": {"format_tags": ["answer"]}},
    "verifiers": {"*": "both"},
}


async def test_a_rubric_sums_its_verifiers_with_the_jobs_settings(pool: Pool) -> None:
    texts = "<answer>#### 42</answer>", "<answer>#### 41</answer>", "#### 42", "#### 41"
    scored = await judge(pool, group(*texts), RewardSpec(**BOTH))
    assert [verdict.reward for verdict in scored.verdicts] == [1.5, 0.5, 1.0, 0.0]
    assert [verdict.accuracy for verdict in scored.verdicts] == [1.0, 0.0, 1.0, 0.0]
    assert {verdict.verifier for verdict in scored.verdicts} == {"both"}
    assert sample(scored)["rollouts"][1]["detail"] == (
        "gsm8k: 0 × 1, accuracy 0 (41 is not 42); format: 1 × 0.5, accuracy 1 (as asked for)"
    )


async def test_a_rows_own_setting_comes_before_the_jobs(pool: Pool) -> None:
    scored = await judge(pool, group("<plan>#### 42</plan>", extra_info={"format_tags": ["plan"]}), RewardSpec(**BOTH))
    assert [verdict.reward for verdict in scored.verdicts] == [1.5]


async def test_held_out_tasks_are_judged_by_their_own_verifier(pool: Pool) -> None:
    spec = RewardSpec(**BOTH, eval_verifiers={"*": "gsm8k"})
    for purpose, reward in ((Purpose.TRAIN, 1.0), (Purpose.EVAL, 1.0)):
        scored = await judge(pool, group("#### 42", purpose=purpose), spec)
        assert [verdict.verifier for verdict in scored.verdicts] == ["both" if purpose is Purpose.TRAIN else "gsm8k"]
        assert scored.verdicts[0].reward == reward


@pytest.mark.usefixtures("installed_here")
@pytest.mark.parametrize("broken", ["odd_raises", "odd_dies", "odd_nan", "odd_missing"])
async def test_a_rubric_whose_part_breaks_has_no_reward(pool: Pool, broken: str) -> None:
    rubric = RubricSpec(verifier_function=["gsm8k", broken], verifier_weight=[1.0, 0.5])
    scored = await judge(pool, group("#### 42"), RewardSpec(rubrics={"r": rubric}, verifiers={"*": "r"}))
    assert [(verdict.status, verdict.reward) for verdict in scored.verdicts] == [(VerdictStatus.FAILED, None)]
    assert scored.verdicts[0].detail.startswith(f"{broken} failed: ")


@pytest.mark.usefixtures("installed_here")
async def test_a_rubric_whose_part_fails_once_is_judged(pool_of: PoolMaker) -> None:
    rubric = RubricSpec(verifier_function=["gsm8k", "odd_fails_once"], verifier_weight=[1.0, 0.5])
    async with pool_of(2) as fresh:
        scored = await judge(fresh, group("#### 42"), RewardSpec(rubrics={"r": rubric}, verifiers={"*": "r"}))
    assert [(verdict.status, verdict.reward) for verdict in scored.verdicts] == [(VerdictStatus.SCORED, 1.5)]


@pytest.mark.usefixtures("installed_here")
async def test_a_rubric_takes_no_longer_than_the_limit_of_its_slowest_part(pool_of: PoolMaker) -> None:
    rubric = RubricSpec(verifier_function=["gsm8k", "odd_sleep"], verifier_weight=[1.0, 0.5])
    spec = RewardSpec(rubrics={"r": rubric}, verifiers={"*": "r"}, timeout_s=0.5)
    async with pool_of(2) as two:
        await judge(two, group("0 #### 0"), spec)
        began = time.monotonic()
        scored = await judge(two, group("60"), spec)
    assert [(verdict.status, verdict.reward) for verdict in scored.verdicts] == [(VerdictStatus.TIMEOUT, 0.0)]
    assert time.monotonic() - began < 2.5  # the other tests use this machine, too


async def test_code_is_not_run_where_the_operator_does_not_allow_it(pool: Pool) -> None:
    scored = await judge(pool, group("```python\nprint(42)\n```"), RewardSpec(verifiers={"*": "code"}))
    assert [(verdict.status, verdict.reward) for verdict in scored.verdicts] == [(VerdictStatus.FAILED, None)]
    assert "MILLRACE_CODE_REWARD=1" in scored.verdicts[0].detail


async def test_a_dispatch_opens_and_closes_what_stands_behind_it() -> None:
    dispatch = Dispatch(RewardSpec(), Pool(1), Settings())
    async with dispatch:
        assert dispatch.fault() is None
        assert [verdict.reward for verdict in (await dispatch.judge(group("#### 42"))).verdicts] == [1.0]
        assert (dispatch.queued, dispatch.progress_at <= time.monotonic()) == (0, True)
    assert "closed" in (dispatch.fault() or "")
