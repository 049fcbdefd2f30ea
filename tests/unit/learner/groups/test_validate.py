"""A group that a rank would break on gets its fate at the buffer, and one that gets through can be assembled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.common.errors import EntryError
from services.common.jobs.fates import Fate
from services.common.models.directory import ModelInfo
from services.common.spec.choices import AdvantageEstimator
from services.common.streams.codec import decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import Rollout, ScoredGroup, Verdict
from services.learner.groups.batch import assemble
from services.learner.groups.buffer import GroupBuffer, Judged
from services.learner.groups.ledger import Ledger
from services.learner.groups.validate import MAX_ABS_REWARD, Limits, rejection_reason
from tests.unit.learner.scored_groups import INFORMATIVE, LIMITS, job_spec, judged_group, make_spec, scored_group

SPEC = make_spec()
KNOWN = "and the model knows 0 to 4095"


def with_prompt(*tokens: int) -> ScoredGroup:
    scored = scored_group(0, INFORMATIVE)
    return replace(scored, group=replace(scored.group, prompt_token_ids=np.array(tokens, "<i4").tobytes()))


def with_tokens(*tokens: int) -> ScoredGroup:
    """The second response is these tokens."""
    scored = scored_group(0, INFORMATIVE, lengths=(2, len(tokens)))
    first, second = scored.group.rollouts
    changed: Rollout = replace(second, token_ids=np.array(tokens, "<i4").tobytes())
    return replace(scored, group=replace(scored.group, rollouts=(first, changed)))


def with_reward(reward: float) -> ScoredGroup:
    scored = scored_group(0, INFORMATIVE)
    first: Verdict = replace(scored.verdicts[0], reward=reward)
    return replace(scored, verdicts=(first, *scored.verdicts[1:]))


REJECTED: dict[str, tuple[Callable[[], ScoredGroup], str]] = {
    "an empty prompt": (with_prompt, "the prompt has no token"),
    "a prompt of another vocabulary": (lambda: with_prompt(7, 4096), f"the prompt has token 4096, {KNOWN}"),
    "a negative prompt token": (lambda: with_prompt(-1, 7), f"the prompt has token -1, {KNOWN}"),
    "a response of another vocabulary": (lambda: with_tokens(5, 2**31 - 1), f"a response has token 2147483647, {KNOWN}"),
    "a negative response token": (lambda: with_tokens(-5), f"a response has token -5, {KNOWN}"),
    "nothing but empty responses": (lambda: scored_group(0, INFORMATIVE, lengths=(0, 0)), "no rollout that was judged has a token"),
    "a response beyond the positions": (
        lambda: scored_group(0, INFORMATIVE, lengths=(2, 1022)), "prompt and response have 1025 tokens; the model takes 1024",
    ),
    "a reward beyond float32's squares": (lambda: with_reward(1e200), "a reward is not finite, or beyond ±1e+09"),
    "no rollout at all": (lambda: scored_group(0, []), "only 0 of 0 rollouts could be judged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_a_group_that_cannot_be_trained_fails_with_its_reason_and_never_waits_for_a_step(name: str) -> None:
    make, reason = REJECTED[name]
    scored = decode(ScoredGroup, encode(make(), MIN_ENTRY_BYTES), MIN_ENTRY_BYTES)  # as it comes off the stream
    buffer = GroupBuffer(SPEC, LIMITS, Ledger())
    buffer.ledger.reissue(4, policy_version=0)
    assert buffer.arrived(Judged(scored, encode(scored, MIN_ENTRY_BYTES), None)) is Fate.FAILED
    assert buffer.ready == 0
    assert [item.reason for item in buffer.ledger.take_unwritten()] == [reason]


def test_one_empty_response_among_others_is_left_out_and_the_group_is_trained() -> None:
    judged = judged_group(0, INFORMATIVE, lengths=(0, 3))
    assert rejection_reason(judged.scored, SPEC, LIMITS) == ""
    (sequence,) = assemble([judged], SPEC)
    assert sequence.response_len == 3


@pytest.mark.parametrize("estimator", sorted(set(AdvantageEstimator) - {AdvantageEstimator.GAE}))
@pytest.mark.parametrize("reward", [MAX_ABS_REWARD, -MAX_ABS_REWARD])
def test_what_is_fit_can_be_assembled_at_the_very_limits(estimator: AdvantageEstimator, reward: float) -> None:
    spec = make_spec(advantage_estimator=estimator)
    scored = scored_group(0, (reward, 0.0, 0.0), accuracies=(1.0, 0.0, 0.0), lengths=(1021, 1, 0))
    changed = replace(scored.group, prompt_token_ids=np.array([0, 4095, 4095], "<i4").tobytes())
    judged = Judged(replace(scored, group=changed), b"", None)
    assert rejection_reason(judged.scored, spec, LIMITS) == ""
    sequences = assemble([judged, judged_group(1, INFORMATIVE)], spec)
    assert [sequence.row_len for sequence in sequences[:2]] == [1023, 3]


def test_half_a_token_cannot_be_decoded() -> None:
    payload = encode(with_prompt(7), MIN_ENTRY_BYTES).replace(np.array([7], "<i4").tobytes(), b"\7\0\0", 1)
    scored: Any = scored_group(0, INFORMATIVE)
    with pytest.raises(ValueError, match="prompt_token_ids has 3 bytes"):
        replace(scored.group, prompt_token_ids=b"\7\0\0")
    with pytest.raises(EntryError):
        decode(ScoredGroup, payload, MIN_ENTRY_BYTES)


def test_the_limits_are_the_models_unless_the_job_asks_for_less() -> None:
    model = ModelInfo(
        "LlamaForCausalLM", 2, 4, 4, 64, 128, vocab_size=128, max_position_embeddings=65536, tie_word_embeddings=True
    )
    assert Limits.of(model, SPEC) == Limits(vocab_size=128, positions=65536)
    assert Limits.of(model, job_spec(model={"path": "tiny", "max_model_len": 32768})).positions == 32768
