"""Stamps: however the outputs are cut into pieces, each token has the version that sampled it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import MillraceError
from services.rollout.engine.engine import _pieces
from services.rollout.engine.stamps import Stamps, tokens_so_far

EVENTS = st.lists(st.one_of(st.just("token"), st.just("read"), st.just("change")), max_size=60)


@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_each_token_has_the_version_that_sampled_it_however_late_it_is_read(rollouts: list[list[str]]) -> None:
    stamps = Stamps()
    for index, events in enumerate(rollouts):
        version, sampled, read, got = 0, list[int](), 0, list[int]()
        for event in [*events, "read"]:
            if event == "token":
                sampled.append(version)
            elif event == "change":
                stamps.change({index: len(sampled)}, version)
                version += 1
            else:
                parts = list(stamps.split(index, len(sampled) - read, version))
                assert parts[0][0] == 0
                assert parts[-1][1] == len(sampled) - read
                for begin, end, of in parts:
                    assert begin < end or len(sampled) == read
                    got += [of] * (end - begin)
                read = len(sampled)
        assert got == sampled


def output(tokens: list[int], logprobs: list[float] | None, reason: str | None = None, *, index: int = 0) -> object:
    flat = None if logprobs is None else SimpleNamespace(token_ids=tokens[: len(logprobs)], logprobs=logprobs)
    return SimpleNamespace(index=index, token_ids=tokens, logprobs=flat, finish_reason=reason)


def test_a_piece_is_cut_at_each_change_and_only_its_last_part_is_the_end() -> None:
    stamps = Stamps()
    stamps.change({0: 2, 1: 5}, 7)
    stamps.change({0: 3}, 8)
    pieces = list(_pieces(output([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], "stop"), stamps, 9))
    assert [(p.token_ids, p.logprobs, p.policy_version, p.finish_reason) for p in pieces] == [
        ([1, 2], [-1.0, -2.0], 7, None),
        ([3], [-3.0], 8, None),
        ([4], [-4.0], 9, "stop"),
    ]


def test_an_end_without_tokens_is_one_empty_piece() -> None:
    (piece,) = _pieces(output([], None, "abort"), Stamps(), 3)
    assert (piece.token_ids, piece.policy_version, piece.finish_reason) == ([], 3, "abort")


@pytest.mark.parametrize("logprobs", [None, [], [-1.0]])
def test_tokens_without_a_log_prob_of_each_are_refused(logprobs: list[float] | None) -> None:
    with pytest.raises(MillraceError, match="2 tokens came without a log-prob of each"):
        list(_pieces(output([1, 2], logprobs), Stamps(), 1))


def test_requests_of_one_rollout_and_of_several_are_told_by_their_own_id() -> None:
    def state(own: str, index: int, tokens: int, parent: str | None = None) -> object:
        asked = None if parent is None else SimpleNamespace(external_req_id=parent)
        detokenizer = SimpleNamespace(num_output_tokens=lambda: tokens)
        return SimpleNamespace(external_req_id=own, parent_req=asked, request_index=index, detokenizer=detokenizer)

    states = {"x-1": state("x", 0, 4), "0_y": state("0_y", 0, 1, "y"), "1_y": state("1_y", 1, 2, "y")}
    llm = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    assert tokens_so_far(llm) == {"x": {0: 4}, "y": {0: 1, 1: 2}}
