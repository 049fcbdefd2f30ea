"""Token losses once more, one token at a time in Python floats: the independent reference of the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, ImportanceLevel, KlEstimator, KlPlacement, LossName
from services.learner.algorithms.losses import LossInputs


@dataclass(frozen=True, slots=True)
class Token:
    """One token as plain numbers."""

    trainer: float
    old: float
    inference: float
    advantage: float
    counts: bool
    sequence: int
    reference: float = 0.0
    entropy: float = 0.0
    kept: bool = True


def random_tokens(
    seed: int, lengths: tuple[int, ...] = (5, 1, 7, 3), masked_share: float = 0.25, spread: float = 0.5
) -> list[Token]:
    """Sequences with ratios on both sides of every bound and advantages of both signs, one per sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> float:
        return float(torch.randn((), generator=generator, dtype=torch.float64)) * scale

    tokens = []
    for sequence, length in enumerate(lengths):
        advantage = normal(1.0)
        for _ in range(length):
            trainer = -abs(normal(2.0))
            old = trainer + normal(spread)
            counts = float(torch.rand((), generator=generator)) >= masked_share
            inference, reference, entropy = old + normal(spread), trainer + normal(spread), abs(normal(1.0))
            kept = normal(1.0) > -0.5
            tokens.append(Token(trainer, old, inference, advantage, counts, sequence, reference, entropy, kept))
    return tokens


def totals(tokens: list[Token]) -> tuple[int, int]:
    """Unmasked tokens, and sequences that have one."""
    counting = [token for token in tokens if token.counts]
    return max(len(counting), 1), max(len({token.sequence for token in counting}), 1)


def to_inputs(
    tokens: list[Token], batch_totals: tuple[int, int] | None = None, dtype: torch.dtype = torch.float64
) -> LossInputs:
    """The tokens as a micro-batch of their own; sequences are numbered anew from 0."""
    global_tokens, global_sequences = batch_totals or totals(tokens)
    ids = {sequence: place for place, sequence in enumerate(dict.fromkeys(token.sequence for token in tokens))}
    return LossInputs(
        trainer_logprobs=torch.tensor([t.trainer for t in tokens], dtype=dtype, requires_grad=True),
        old_logprobs=torch.tensor([t.old for t in tokens], dtype=dtype),
        inference_logprobs=torch.tensor([t.inference for t in tokens], dtype=dtype),
        advantages=torch.tensor([t.advantage for t in tokens], dtype=dtype),
        loss_mask=torch.tensor([t.counts for t in tokens]),
        sequence_ids=torch.tensor([ids[t.sequence] for t in tokens]),
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        entropy=torch.tensor([t.entropy for t in tokens], dtype=dtype, requires_grad=True),
        reference_logprobs=torch.tensor([t.reference for t in tokens], dtype=dtype),
        importance_kept=torch.tensor([t.kept for t in tokens]),
    )


def naive_total(tokens: list[Token], algorithm: AlgorithmSpec, frozen: list[Token] | None = None) -> float:
    """The loss of the whole batch, masked tokens left out of every sum. `frozen` are the tokens where gradients are stopped."""
    frozen = frozen or tokens
    sequences: dict[int, list[tuple[Token, Token]]] = {}
    for token, held in zip(tokens, frozen, strict=True):
        if token.counts:
            sequences.setdefault(token.sequence, []).append((token, held))
    sums = []
    for members in sequences.values():
        moving = sum(token.trainer - token.old for token, _ in members) / len(members)
        frozen_mean = sum(held.trainer - held.old for _, held in members) / len(members)
        own = [
            frozen_mean + token.trainer - held.trainer for token, held in members
        ]  # GSPO-token: sg[s_i] · π_t / sg[π_t]
        logs = [moving] * len(members) if algorithm.revision == 1 else own
        weights = _importance([token for token, _ in members], algorithm)
        sums.append(
            [
                _policy_loss(token, held, log, algorithm) * weight + _regularization(token, algorithm)
                for (token, held), log, weight in zip(members, logs, weights, strict=True)
            ]
        )
    if algorithm.token_level_loss:
        return sum(map(sum, sums)) / sum(map(len, sums))
    if algorithm.constant_length is not None:
        return sum(sum(losses) / algorithm.constant_length for losses in sums) / len(sums)
    return sum(sum(losses) / len(losses) for losses in sums) / len(sums)


def naive_gradient(tokens: list[Token], algorithm: AlgorithmSpec, step: float = 1e-5) -> list[float]:
    """Central differences of `naive_total` in each token's trainer log-prob."""
    gradient = []
    for place, token in enumerate(tokens):
        moved = []
        for sign in (1.0, -1.0):
            changed = [*tokens]
            changed[place] = replace(token, trainer=token.trainer + sign * step)
            moved.append(naive_total(changed, algorithm, frozen=tokens))
        gradient.append((moved[0] - moved[1]) / (2.0 * step))
    return gradient


def kink_distance(tokens: list[Token], algorithm: AlgorithmSpec) -> float:
    """How near any ratio is to a bound, where the loss has a corner and differences say nothing."""
    bounds = [1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high, algorithm.dual_clip or 3.0]
    bounds += [algorithm.importance_weight_floor, algorithm.importance_weight_cap or 2.0]
    ratios = [math.exp(t.trainer - t.old) for t in tokens] + [math.exp(t.old - t.inference) for t in tokens]
    for sequence in {t.sequence for t in tokens}:
        logs = [t.trainer - t.old for t in tokens if t.sequence == sequence and t.counts]
        ratios += [math.exp(sum(logs) / len(logs))] if logs else []
        sums = [t.old - t.inference for t in tokens if t.sequence == sequence and t.counts]
        ratios += [math.exp(sum(sums)), math.exp(sum(sums) / len(sums))] if sums else []
    return min(abs(ratio - bound) for ratio in ratios for bound in bounds)


def _policy_loss(token: Token, held: Token, mean_log: float, algorithm: AlgorithmSpec) -> float:
    ratio = math.exp(mean_log if algorithm.loss is LossName.GSPO else token.trainer - token.old)
    low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
    if algorithm.loss is LossName.CISPO:
        loss = -min(math.exp(held.trainer - held.old), high) * token.advantage * token.trainer
    elif algorithm.loss is LossName.SURROGATE:
        loss = -ratio * token.advantage
    else:
        objective = min(ratio * token.advantage, min(max(ratio, low), high) * token.advantage)
        if algorithm.dual_clip is not None and token.advantage < 0:
            objective = max(objective, algorithm.dual_clip * token.advantage)
        loss = -objective
    return loss + algorithm.proximal_kl_coefficient * _kl(algorithm.proximal_kl_estimator, token.trainer - token.old)


def _regularization(token: Token, algorithm: AlgorithmSpec) -> float:
    """β · KL(π_trainer ‖ π_ref) − coefficient · entropy."""
    loss = -algorithm.entropy_coefficient * token.entropy
    if algorithm.kl_placement is KlPlacement.LOSS:
        loss += algorithm.kl_coefficient * _kl(algorithm.kl_estimator, token.reference - token.trainer)
    return loss


def _kl(estimator: KlEstimator, x: float) -> float:
    return {KlEstimator.K1: -x, KlEstimator.K2: x * x / 2, KlEstimator.K3: math.exp(x) - x - 1}[estimator]


def _importance(members: list[Token], algorithm: AlgorithmSpec) -> list[float]:
    """The weight of each of a sequence's unmasked tokens."""
    logs = [token.old - token.inference for token in members]
    match algorithm.importance_level:
        case ImportanceLevel.TOKEN:
            pass
        case ImportanceLevel.SEQUENCE:
            logs = [sum(logs)] * len(logs)
        case ImportanceLevel.GEOMETRIC:
            logs = [sum(logs) / len(logs)] * len(logs)
    ratios = [math.exp(log) for log in logs]
    return [_weight(ratio, token.kept, algorithm) for ratio, token in zip(ratios, members, strict=True)]


def _weight(ratio: float, kept: bool, algorithm: AlgorithmSpec) -> float:
    cap = algorithm.importance_weight_cap or math.nan
    match algorithm.importance_correction:
        case ImportanceCorrection.NONE:
            return 1.0
        case ImportanceCorrection.DECOUPLED:
            return ratio
        case ImportanceCorrection.TRUNCATED:
            return min(ratio, cap)
        case ImportanceCorrection.MASKED:
            return ratio if algorithm.importance_weight_floor <= ratio <= cap else 0.0
        case ImportanceCorrection.M2PO:
            return ratio if kept else 0.0
