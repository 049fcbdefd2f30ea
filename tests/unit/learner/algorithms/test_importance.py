"""Importance weights at the levels of tokens and sequences, and the tokens that M2PO keeps, against naive loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, ImportanceLevel
from services.learner.algorithms.importance import importance_weights, second_moment_mask

LOG_RATIOS = st.lists(st.one_of(st.sampled_from([0.0, 0.1, -0.1, 1.0]), st.floats(-15.0, 15.0)), max_size=30)


def naive_mask(log_ratios: list[float], threshold: float) -> list[bool]:
    """Leaves out the largest one after the other."""
    kept = list(range(len(log_ratios)))
    while kept and math.fsum(log_ratios[i] ** 2 for i in kept) / len(kept) > threshold:
        kept.remove(max(kept, key=lambda i: (log_ratios[i] ** 2, i)))
    return [i in kept for i in range(len(log_ratios))]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(LOG_RATIOS, st.floats(1e-3, 30.0))
def test_the_largest_are_left_out_until_the_second_moment_is_within_its_threshold(
    log_ratios: list[float], threshold: float
) -> None:
    # Sums of such squares are exact, so that both ways of summing agree at the threshold.
    exact = [round(value * 16) / 16 for value in log_ratios]
    assert second_moment_mask(np.array(exact, np.float64), threshold).tolist() == naive_mask(exact, threshold)


@settings(derandomize=True, deadline=None)
@given(LOG_RATIOS, st.floats(1e-3, 30.0), st.floats(1.0, 10.0))
def test_a_larger_threshold_keeps_all_that_a_smaller_one_kept(
    log_ratios: list[float], threshold: float, more: float
) -> None:
    values = np.array(log_ratios, np.float64)
    few, many = second_moment_mask(values, threshold), second_moment_mask(values, threshold * more)
    assert not (few & ~many).any()


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-15.0, 15.0), max_size=30, unique_by=abs), st.floats(1e-3, 30.0), st.randoms())
def test_where_the_tokens_are_does_not_matter(log_ratios: list[float], threshold: float, random: Any) -> None:
    order = list(range(len(log_ratios)))
    random.shuffle(order)
    values = np.array(log_ratios, np.float64)
    kept = second_moment_mask(values, threshold)
    assert second_moment_mask(values[order], threshold).tolist() == kept[order].tolist()


def test_the_edges_of_the_second_moment_mask() -> None:
    def mask(*values: float, threshold: float = 0.04) -> list[bool]:
        kept: list[bool] = second_moment_mask(np.array(values, np.float64), threshold).tolist()
        return kept

    assert mask() == []
    assert mask(0.19) == [True]
    assert mask(math.log(1e6)) == [False]
    assert mask(0.25, 0.25, 0.0, threshold=0.04) == [True, False, True]  # of equal ones the later is left out
    assert mask(math.nan, 0.1, math.inf, -math.inf) == [False, True, False, False]
    assert mask(math.log(1e6), math.log(1e-6), 0.0) == [False, False, True]


def weights(
    correction: ImportanceCorrection, level: ImportanceLevel, log_ratios: list[list[float]], **bounds: float
) -> list[float]:
    """Weights of whole sequences; each begins with a masked token, whose log-ratio is 0."""
    logs = torch.tensor([log for sequence in log_ratios for log in (0.0, *sequence)], dtype=torch.float64)
    ids = [i for i, sequence in enumerate(log_ratios) for _ in (0.0, *sequence)]
    mask = torch.tensor([bool(t) for sequence in log_ratios for t in range(len(sequence) + 1)])
    algorithm = AlgorithmSpec.model_validate(
        {"importance_correction": correction, "importance_level": level} | {f"importance_weight_{k}": v for k, v in bounds.items()}
    )  # fmt: skip
    found, _ = importance_weights(logs, torch.zeros_like(logs), algorithm, mask=mask, sequence_ids=torch.tensor(ids))
    return found[mask].tolist()


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=5), min_size=1, max_size=4))
def test_the_weight_of_a_sequence_is_the_product_or_the_geometric_mean_of_its_ratios(logs: list[list[float]]) -> None:
    ratios = [[math.exp(log) for log in sequence] for sequence in logs]
    products = [min(math.prod(sequence), math.exp(20.0)) for sequence in ratios]
    means = [math.prod(sequence) ** (1 / len(sequence)) for sequence in ratios]
    for level, of_sequence in ((ImportanceLevel.SEQUENCE, products), (ImportanceLevel.GEOMETRIC, means)):
        each = [weight for weight, sequence in zip(of_sequence, ratios, strict=True) for _ in sequence]
        assert weights(ImportanceCorrection.DECOUPLED, level, logs) == pytest.approx(each, rel=1e-9)
        capped = [min(weight, 2.0) for weight in each]
        assert weights(ImportanceCorrection.TRUNCATED, level, logs, cap=2.0) == pytest.approx(capped, rel=1e-9)
    tokens = [ratio for sequence in ratios for ratio in sequence]
    assert weights(ImportanceCorrection.DECOUPLED, ImportanceLevel.TOKEN, logs) == pytest.approx(tokens, rel=1e-12)


def test_a_sequence_outside_the_band_is_left_out_whole_even_where_its_tokens_are_within() -> None:
    logs = [[0.5, 0.5], [0.1, -0.1]]
    masked = ImportanceCorrection.MASKED
    assert weights(masked, ImportanceLevel.SEQUENCE, logs, cap=2.0, floor=0.5) == pytest.approx([0.0, 0.0, 1.0, 1.0])
    geometric = weights(masked, ImportanceLevel.GEOMETRIC, logs, cap=2.0, floor=0.5)
    assert geometric == pytest.approx([math.exp(0.5)] * 2 + [1.0] * 2)


def test_a_long_sequence_far_off_has_a_finite_weight() -> None:
    (weight, *_) = weights(ImportanceCorrection.DECOUPLED, ImportanceLevel.SEQUENCE, [[math.log(1e6)] * 100])
    assert weight == pytest.approx(math.exp(20.0))
    (weight, *_) = weights(ImportanceCorrection.DECOUPLED, ImportanceLevel.GEOMETRIC, [[math.log(1e6)] * 100])
    assert weight == pytest.approx(1e6)
