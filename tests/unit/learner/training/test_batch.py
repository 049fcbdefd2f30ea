"""The tensors of a micro-batch, against a walk over the sequences token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.learner.groups.sequence import Sequence
from services.learner.training.batch import MicroBatch, Row, RowForm, block_diagonal_mask, collate, response_offsets

CPU = torch.device("cpu")


def sequences() -> list[Sequence]:
    rng = np.random.default_rng(1)
    made = []
    for i, (prompt, response) in enumerate([(1, 4), (3, 2), (2, 5), (4, 1)]):
        made.append(
            Sequence(
                tokens=rng.integers(1, 99, prompt + response).astype(np.int32),
                prompt_len=prompt,
                inference_logprobs=rng.normal(size=response).astype(np.float32),
                advantage=rng.normal(size=response).astype(np.float32),
                loss_mask=rng.random(response) > 0.5,
                group_id=i,
            )
        )
    return made


@pytest.mark.parametrize("rows", [[(2,), (0,)], [(0, 3), (2,)], [(1, 0, 3)]])
def test_every_response_token_is_predicted_from_the_token_before_it(rows: list[Row]) -> None:
    batch, all_sequences = None, sequences()
    batch = collate(all_sequences, rows, response_offsets(all_sequences)[:-1], CPU)
    order = [i for row in rows for i in row]
    flattened = batch.tokens.T.reshape(-1)  # [s · b], as the hidden states are
    r = 0
    for ordinal, i in enumerate(order):
        s = all_sequences[i]
        for t in range(s.response_len):
            assert int(flattened[batch.positions[r]]) == s.tokens[s.prompt_len + t - 1]
            assert int(batch.targets[r]) == s.tokens[s.prompt_len + t]
            assert float(batch.inference_logprobs[r]) == float(s.inference_logprobs[t])
            assert bool(batch.loss_mask[r]) == bool(s.loss_mask[t])
            assert int(batch.sequence_ids[r]) == ordinal
            assert int(batch.offsets[r]) == sum(q.response_len for q in all_sequences[:i]) + t
            r += 1
    assert r == len(batch.targets)


@pytest.mark.parametrize("form", RowForm)
@pytest.mark.parametrize("rows", [[(2,), (0,)], [(0, 3), (2,)], [(3,)], []])
def test_padding_to_a_multiple_comes_after_every_token_of_a_row(rows: list[Row], form: RowForm) -> None:
    all_sequences = sequences()
    offsets = response_offsets(all_sequences)
    if form is RowForm.SHARED:  # each of these has a prompt of its own
        rows = [(i,) for row in rows for i in row]
    plain = collate(all_sequences, rows, offsets, CPU, form=form)
    padded = collate(all_sequences, rows, offsets, CPU, form=form, multiple=16)
    length = plain.tokens.shape[1]
    assert padded.tokens.shape == (plain.tokens.shape[0], -(-length // 16) * 16)
    assert torch.equal(padded.tokens[:, :length], plain.tokens)
    assert not padded.tokens[:, length:].any()
    for name in ("positions", "targets", "inference_logprobs", "loss_mask", "sequence_ids", "offsets"):
        assert torch.equal(getattr(padded, name), getattr(plain, name)), name
    if padded.position_ids is not None and plain.position_ids is not None:
        assert torch.equal(padded.position_ids[:length], plain.position_ids)
        assert bool((padded.position_ids[length - 1 :].diff() == 1).all())
    if form is not RowForm.PADDED and padded.attention is not None and plain.attention is not None:
        change = padded.attention - plain.attention
        assert (int(change[-1, 0]), int(change.sum())) == (16 - length % 16, 16 - length % 16)
    elif padded.attention is not None and plain.attention is not None:
        assert torch.equal(padded.attention[..., :length, :length], plain.attention)
        assert not padded.attention[..., :length, length:].any()


def test_there_is_a_mask_only_where_rows_are_packed() -> None:
    all_sequences = sequences()
    offsets = response_offsets(all_sequences)
    assert collate(all_sequences, [(0,), (1,)], offsets, CPU).attention is None
    packed = collate(all_sequences, [(0, 3), (1,)], offsets, CPU).attention
    assert packed is not None
    segments = torch.tensor([[0] * 4 + [1] * 4, [0] * 4 + [-1] * 4])
    assert torch.equal(packed, block_diagonal_mask(segments))


def test_a_shared_prompt_is_in_the_row_once_and_every_response_goes_on_where_it_ends() -> None:
    lengths = [4, 1, 3, 1]
    prompts = [np.array([7, 8, 9], np.int32)] * 3 + [np.array([5], np.int32)]
    rng = np.random.default_rng(2)
    made = [
        Sequence(
            tokens=np.concatenate([prompt, rng.integers(10, 99, n).astype(np.int32)]),
            prompt_len=len(prompt),
            inference_logprobs=rng.normal(size=n).astype(np.float32),
            advantage=rng.normal(size=n).astype(np.float32),
            loss_mask=np.ones(n, bool),
            group_id=len(prompt),
        )
        for prompt, n in zip(prompts, lengths, strict=True)
    ]
    rows: list[Row] = [(2, 1, 0), (3,)]
    batch = collate(made, rows, response_offsets(made)[:-1], CPU, form=RowForm.SHARED)
    a, b = made[2], made[0]
    assert batch.tokens.tolist() == [[7, 8, 9, *a.tokens[3:-1], *b.tokens[3:-1], 5]]
    assert batch.attention is not None
    assert batch.attention.tolist() == [[3, 1], [2, 0], [3, 0], [1, 1]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0]
    assert batch.positions.tolist() == [2, 3, 4, 2, 2, 5, 6, 7, 8]
    assert batch.targets.tolist() == [*a.tokens[3:], made[1].tokens[3], *b.tokens[3:], made[3].tokens[1]]
    assert batch.offsets.tolist() == [5, 6, 7, 4, 0, 1, 2, 3, 8]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]


def test_an_empty_micro_batch_runs_one_masked_token() -> None:
    batch: MicroBatch = collate([], [], [], CPU)
    assert batch.tokens.shape == (1, 1)
    assert batch.loss_mask.tolist() == [False]
    assert batch.offsets.tolist() == [-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": 0}, "group 7: 3 tokens with prompt_len 0"),
        ({"prompt_len": 3}, "group 7: 3 tokens with prompt_len 3"),
        ({"advantage": np.zeros(3, np.float32)}, "group 7: advantage has 3 items for 1 tokens"),
        ({"inference_logprobs": np.array([np.nan], np.float32)}, "group 7: inference_logprobs is not finite"),
    ],
)
def test_a_sequence_that_does_not_fit_together_is_refused(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "tokens": np.array([1, 2, 3], np.int32),
        "prompt_len": 2,
        "inference_logprobs": np.zeros(1, np.float32),
        "advantage": np.zeros(1, np.float32),
        "loss_mask": np.ones(1, bool),
        "group_id": 7,
    }
    with pytest.raises(ValueError, match=message):
        Sequence(**(fields | change))  # type: ignore[arg-type]
