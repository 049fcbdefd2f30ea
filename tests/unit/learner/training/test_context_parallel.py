"""Context parallelism: the ranks' parts make up the whole, and their attention is that of one rank, against a naive one in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.groups.sequence import Sequence
from services.learner.megatron.context_attention import attend
from services.learner.training.batch import MicroBatch, RowForm, collate, response_offsets
from services.learner.training.context_chunks import chunks_of, own_pieces, row_order
from services.learner.training.context_parallel import all_tokens, part_of
from services.learner.training.npu_attention import Piece, fused_attention
from services.learner.training.prompt_sharing import Segment, by_piece, encode_segments
from tests.unit.learner.training.test_npu_attention import documented_kernel
from tests.unit.learner.training.test_prompt_sharing import GROUPS, Groups, inputs, leaves, naive, segments_of

CPU = torch.device("cpu")
SIZES = st.integers(1, 4)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Piece, ...], float], torch.Tensor]
KERNELS: dict[str, Attention] = {
    "cpu": attend,
    "cuda": by_piece,
    "npu": partial(fused_attention, kernel=documented_kernel),
}


def positions_of(length: int, size: int, rank: int) -> torch.Tensor:
    """A rank's positions of a row, in its order."""
    return torch.arange(length).view(2 * size, -1)[list(chunks_of(size, rank))].flatten()


def padded(segments: list[Segment], size: int) -> list[Segment]:
    """The last one longer, up to a length that the chunks divide."""
    *others, (length, is_prompt) = segments
    return [*others, Segment(length + -sum(s.length for s in segments) % (2 * size), is_prompt)]


def pieces(segments: list[Segment], size: int, rank: int) -> tuple[Piece, ...]:
    return own_pieces(encode_segments(segments).numpy().tobytes(), size, rank)


@given(SIZES, st.integers(1, 9))
def test_every_position_is_one_ranks_and_the_gathered_chunks_are_put_back_in_order(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    gathered = torch.cat([positions_of(length, size, rank) for rank in range(size)])
    assert torch.equal(gathered.view(2 * size, chunk)[row_order(size)].flatten(), torch.arange(length))


@given(SIZES, st.integers(1, 50))
def test_of_one_long_response_every_rank_has_the_same_number_of_pairs(size: int, chunk: int) -> None:
    segments = [Segment(2 * size * chunk, is_prompt=True)]
    pairs = set()
    for rank in range(size):
        own = pieces(segments, size, rank)
        pairs.add(sum(p.length * (sum(n for _, n in p.keys) - p.length) + p.length * (p.length + 1) // 2 for p in own))
    assert len(pairs) == 1


@given(GROUPS, SIZES)
def test_a_ranks_pieces_are_its_queries_in_their_order(groups: Groups, size: int) -> None:
    segments = padded(segments_of(groups), size)
    for rank in range(size):
        own = positions_of(sum(s.length for s in segments), size, rank)
        found = []
        reached = 0
        for start, length, keys in pieces(segments, size, rank):
            assert start == reached
            reached += length
            end = sum(keys[-1])
            found.append(torch.arange(end - length, end))
        assert torch.equal(torch.cat(found), own)


@pytest.mark.parametrize("kernel", KERNELS)
@given(GROUPS, SIZES)
@settings(max_examples=40)
def test_together_the_ranks_compute_attention_and_gradients_of_the_row(kernel: str, groups: Groups, size: int) -> None:
    segments = padded(segments_of(groups), size)
    (query, key, value), gradient = inputs(segments, torch.float64)
    whole = leaves((query, key, value))
    expected = naive(*whole, segments, 0.3)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    tolerance = 1e-6 if kernel == "npu" else 1e-9
    for rank in range(size):
        own = positions_of(len(query), size, rank)
        mine = leaves((query[own], key, value))
        found = KERNELS[kernel](*mine, pieces(segments, size, rank), 0.3)
        torch.testing.assert_close(found, expected[own], rtol=tolerance, atol=tolerance)
        found.backward(gradient[own])  # type: ignore[no-untyped-call]
        assert whole[0].grad is not None
        torch.testing.assert_close(mine[0].grad, whole[0].grad[own], rtol=tolerance, atol=tolerance)
        for total, part in zip(sums, mine[1:], strict=True):
            assert part.grad is not None
            total.add_(part.grad)
    for total, leaf in zip(sums, whole[1:], strict=True):
        torch.testing.assert_close(total, leaf.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_it_rounds_as_one_kernel_would(dtype: torch.dtype, bound: float) -> None:
    segments = padded(segments_of([(70, [40, 3, 65]), (1, [1]), (30, [])]), 2)
    (query, key, value), gradient = inputs(segments, dtype)
    others = leaves((query, key, value), torch.float64)
    expected = naive(*others, segments, 16**-0.5)
    expected.backward(gradient.double())  # type: ignore[no-untyped-call]
    for rank in range(2):
        own = positions_of(len(query), 2, rank)
        mine = leaves((query[own], key, value))
        found = attend(*mine, pieces(segments, 2, rank), 16**-0.5)
        assert found.dtype is dtype
        found.backward(gradient[own])  # type: ignore[no-untyped-call]
        assert mine[0].grad is not None
        assert others[0].grad is not None
        for a, b in ((found.detach(), expected[own].detach()), (mine[0].grad, others[0].grad[own])):
            assert float((a.double() - b).norm() / b.norm()) < bound


def micro_batch(lengths: list[tuple[int, int, int]], size: int) -> MicroBatch:
    """One row of groups: the prompt's length, the responses' length, and their number."""
    rng = np.random.default_rng(0)
    sequences: list[Sequence] = []
    rows = []
    for group, (prompt_len, response, count) in enumerate(lengths):
        prompt = rng.integers(0, 99, prompt_len)
        rows.append(tuple(range(len(sequences), len(sequences) + count)))
        for _ in range(count):
            tokens = np.concatenate([prompt, rng.integers(0, 99, response)]).astype(np.int32)
            figures = rng.normal(size=response).astype(np.float32)
            sequences.append(Sequence(tokens, prompt_len, figures, figures, figures > 0, group))
    return collate(sequences, rows, response_offsets(sequences), CPU, form=RowForm.SHARED, multiple=2 * size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", [[(5, 7, 3), (20, 1, 2), (1, 4, 1)], [(2, 50, 1)], [(60, 3, 1)], [(1, 1, 1)], []])
def test_the_parts_of_a_micro_batch_are_the_whole(lengths: list[tuple[int, int, int]], size: int) -> None:
    whole = micro_batch(lengths, size)
    length = whole.tokens.shape[1]
    rotary = torch.arange(length) if whole.position_ids is None else whole.position_ids
    predicted = []
    for rank in range(size):
        own, part = positions_of(length, size, rank), part_of(whole, size, rank)
        assert part.own is not None
        assert part.position_ids is not None
        assert torch.equal(part.tokens, whole.tokens[:, own])
        assert torch.equal(part.position_ids, rotary[own])
        assert torch.equal(own[part.positions], whole.positions[part.own])
        assert part.attention is not None
        assert int(part.attention[:, 0].sum()) == length
        for name in ("targets", "inference_logprobs", "loss_mask", "sequence_ids", "offsets"):
            assert getattr(part, name) is getattr(whole, name), name
        predicted.append(part.own)
    assert torch.equal(torch.cat(predicted).sort().values, torch.arange(len(whole.targets)))


def test_on_one_rank_the_own_tokens_are_all() -> None:
    whole, values = micro_batch([(5, 7, 3)], 2), torch.arange(21.0)
    assert all_tokens(values, whole, None) is values
