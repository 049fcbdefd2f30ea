"""What an episode observed is computed and never trained: no gradient, no part in any mean, count or penalty, for every loss."""

# ruff: noqa: ARG002  the stand-ins' methods have the arguments that they have

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator, ImportanceCorrection, ProximalPolicy, TurnCredit
from services.common.spec.job import JobSpec
from services.common.streams.types import FinishReason, Rollout, Turn, VersionSpan
from services.learner.algorithms.advantages import Responses, estimate
from services.learner.algorithms.importance import second_moment_mask
from services.learner.algorithms.losses import make_loss
from services.learner.groups import batch
from services.learner.groups.batch import assemble
from services.learner.groups.buffer import Judged
from services.learner.groups.sequence import Sequence as TrainedSequence
from services.learner.training.actor import Actor
from services.learner.training.backend import Backend, OnOutput
from services.learner.training.batch import MicroBatch, RowForm, response_offsets
from services.learner.training.columns import Columns
from services.learner.training.critic import Critic
from services.learner.training.layout import Layout
from services.learner.training.passes import Passes, PreparedBatch
from services.learner.training.update import LARGEST, Update
from tests.unit.learner.algorithms.references import Token, naive_total
from tests.unit.learner.algorithms.test_losses import ALL
from tests.unit.learner.scored_groups import job_spec, judged_group

VOCABULARY, TEMPERATURE = 31, 0.8
CPU = torch.device("cpu")
BY_CREDIT = pytest.mark.parametrize("credit", TurnCredit)
BY_LOSS = pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Observed, sampled tokens and own reward of each turn, by episode; an empty one is a completion of six tokens.
GROUPS: list[list[list[tuple[int, int, float | None]]]] = [
    [[(0, 2, 0.5), (3, 1, None), (1, 2, 0.25)], [(0, 1, None)], [(0, 3, None), (5, 2, None)]],
    [[], [(0, 1, None), (2, 4, 0.125)]],
    [[(0, 2, None), (1, 1, None), (4, 1, -0.5), (1, 3, None)], [(0, 4, 0.75), (2, 2, None)]],
]
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0], [-1.0, 2.0]]


def an_episode(turns: list[tuple[int, int, float | None]], random: np.random.Generator) -> Rollout:
    length = sum(observed + sampled for observed, sampled, _ in turns) or 6
    made = Rollout(
        random.integers(0, VOCABULARY, length).astype("<i4").tobytes(), bytes(4 * length), "", FinishReason.STOP,
        (VersionSpan(0, 0), VersionSpan(length // 2, 1)) if length > 2 else (VersionSpan(0, 0),),
        tuple(Turn(observed, sampled, FinishReason.STOP, reward) for observed, sampled, reward in turns),
    )  # fmt: skip
    logprobs = np.where(made.sampled, -2 * np.abs(random.normal(size=length)), 0.0).astype("<f4")
    return replace(made, inference_logprobs=logprobs.tobytes())


def squeezed(rollout: Rollout) -> Rollout:
    """The same episode, as if nothing had been observed in it."""
    kept = rollout.sampled
    versions = rollout.token_versions[kept]
    starts = [at for at in range(len(versions)) if at == 0 or versions[at] != versions[at - 1]]
    return replace(
        rollout,
        token_ids=rollout.tokens[kept].tobytes(),
        inference_logprobs=rollout.logprobs[kept].tobytes(),
        versions=tuple(VersionSpan(at, int(versions[at])) for at in starts),
        turns=tuple(replace(turn, observed=0) for turn in rollout.turns),
    )


def with_rollouts(judged: Judged, rollouts: Sequence[Rollout]) -> Judged:
    scored = judged.scored
    return replace(judged, scored=replace(scored, group=replace(scored.group, rollouts=tuple(rollouts))))


def groups() -> list[Judged]:
    random = np.random.default_rng(7)
    return [
        with_rollouts(judged_group(number, rewards), [an_episode(turns, random) for turns in episodes])
        for number, (episodes, rewards) in enumerate(zip(GROUPS, REWARDS, strict=True))
    ]


def rollouts_of(judged: list[Judged]) -> list[Rollout]:
    return [rollout for group in judged for rollout in group.scored.group.rollouts]


@dataclass
class Still:
    """An optimizer that changes nothing."""

    def zero_grad(self) -> None: ...

    def step(self, loss: float, lr: float, device: torch.device) -> tuple[float, str]:
        return 0.0, ""


@dataclass
class Table:
    """A model whose output at each response token of the batch is a row of its own, so that each has a gradient of its own."""

    rows: torch.Tensor
    optimizer: Still = field(default_factory=Still)

    def run(self, micro_batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> None:
        for one in micro_batches:
            loss, _ = on_output(one, self.rows[one.offsets])
            torch.autograd.backward(loss)

    def figures(self) -> dict[str, float]:
        return {}


@dataclass
class OneRank:
    """A back end of one rank."""

    layout = Layout(rank=0, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, dp_size=1, dp_rank=0)
    device = CPU
    row_form = RowForm.JOINED
    vocabulary_group = context_group = None


def spec_of(algorithm: AlgorithmSpec, credit: TurnCredit = TurnCredit.TRAJECTORY) -> JobSpec:
    if algorithm.kl_in_reward:
        credit = TurnCredit.TRAJECTORY  # the only one that there is then
    base = job_spec(learner={"max_tokens_per_micro_batch": 24}, rollout={"temperature": TEMPERATURE})
    return base.model_copy(update={"algorithm": algorithm.model_copy(update={"turn_credit": credit})})


@dataclass(frozen=True)
class Step:
    """One optimizer step of the actor on a batch, and its inputs, of all response tokens."""

    sequences: list[TrainedSequence]
    columns: Columns
    rows: torch.Tensor
    """With its gradient."""
    update: Update
    sampled: torch.Tensor


def prepared(spec: JobSpec, sequences: list[TrainedSequence]) -> tuple[Passes, PreparedBatch]:
    passes = Passes(spec.learner, cast("Backend", OneRank()))
    whole = passes.prepare(sequences)
    assert len(whole.micro_batches) > 1
    return passes, whole


def columns_of(judged: list[Judged], sequences: list[TrainedSequence], spec: JobSpec) -> tuple[Columns, torch.Tensor]:
    """Advantages of the head, or estimated as the ranks do; and random values of all else, logits last. Equal at sampled tokens.

    A number is drawn for each sampled token first, so that episodes without their observed tokens get the same ones.
    """
    sampled = np.concatenate([rollout.sampled for rollout in rollouts_of(judged)])
    random, observed = np.random.default_rng(3), np.random.default_rng(4)

    def column(*shape: int) -> torch.Tensor:
        values = observed.normal(scale=5.0, size=(len(sampled), *shape))
        values[sampled] = random.normal(size=(int(sampled.sum()), *shape))
        return torch.from_numpy(values).float()

    targets = torch.from_numpy(np.concatenate([one.tokens[one.prompt_len :] for one in sequences])).long()
    near = torch.from_numpy(np.concatenate([one.inference_logprobs for one in sequences])) - 0.1
    old, reference = near + 0.3 * column(), near + 0.3 * column()
    advantages = torch.from_numpy(np.concatenate([one.advantage for one in sequences]))
    engine = np.concatenate([one.inference_logprobs for one in sequences]).astype(np.float64)
    kept = np.ones(len(sampled), bool)
    kept[sampled] = second_moment_mask((old.numpy() - engine)[sampled], 0.04)
    algorithm = spec.algorithm
    if algorithm.kl_in_reward:
        estimated = estimate(responses_of(sequences), algorithm)
        advantages = torch.from_numpy(np.concatenate(estimated.advantages))
    share = torch.full((len(sampled),), 0.5)
    columns = Columns(
        advantages=advantages,
        old_logprobs=old if algorithm.proximal_policy is ProximalPolicy.TRAINER else None,
        reference_logprobs=reference,
        proximal_share=share,
        importance_kept=torch.from_numpy(kept)
        if algorithm.importance_correction is ImportanceCorrection.M2PO
        else None,
    )
    return columns, logits_that_give(targets, (near + 0.3 * column()).clamp_max(-0.01), column(VOCABULARY))


def logits_that_give(targets: torch.Tensor, logprobs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits with those of the targets changed, so that they have about these log-probs."""
    others = (logits / TEMPERATURE).scatter(1, targets[:, None], -torch.inf).logsumexp(-1)
    odds = logprobs - torch.log1p(-logprobs.exp())
    return logits.scatter(1, targets[:, None], (TEMPERATURE * (others + odds))[:, None])


def responses_of(sequences: list[TrainedSequence]) -> Responses:
    return Responses(
        [one.group_id for one in sequences], [one.reward for one in sequences], [one.loss_mask for one in sequences]
    )


def step(judged: list[Judged], spec: JobSpec) -> Step:
    sequences = assemble(judged, spec)
    passes, whole = prepared(spec, sequences)
    columns, rows = columns_of(judged, sequences, spec)
    rows.requires_grad_()
    actor = Actor(cast("Any", Table(rows)), spec, cast("Backend", OneRank()), passes, make_loss(spec.algorithm))
    update = actor.update(whole, columns, 0.0, spec.algorithm.kl_coefficient)
    sampled = torch.from_numpy(np.concatenate([rollout.sampled for rollout in rollouts_of(judged)]))
    return Step(sequences, columns, rows, update, sampled)


def naive_advantages(spec: JobSpec) -> list[list[float]]:
    """Of each token, by loops over groups, episodes and turns: (r − mean) / std of the group, summed over the turns from it on."""
    found = []
    for episodes, rewards in zip(GROUPS, REWARDS, strict=True):
        turns = [
            ([(observed + sampled, own or 0.0) for observed, sampled, own in episode] or [(6, 0.0)])
            if spec.algorithm.turn_credit is TurnCredit.TURN
            else [(sum(observed + sampled for observed, sampled, _ in episode) or 6, 0.0)]
            for episode in episodes
        ]
        for own, reward in zip(turns, rewards, strict=True):
            own[-1] = (own[-1][0], own[-1][1] + reward)
        everywhere = [reward for own in turns for _, reward in own]
        mean = sum(everywhere) / len(everywhere)
        spread = (sum((reward - mean) ** 2 for reward in everywhere) / (len(everywhere) - 1)) ** 0.5 + 1e-6
        for own in turns:
            scaled = [(reward - mean) / spread for _, reward in own]
            found.append([sum(scaled[at:]) for at, (tokens, _) in enumerate(own) for _ in range(tokens)])
    return found


def naive_tokens(done: Step, spec: JobSpec) -> list[Token]:
    """All response tokens as plain numbers, in float64."""
    logits = done.rows.detach().double() / TEMPERATURE
    everything = torch.log_softmax(logits, -1)
    columns, algorithm, tokens = done.columns, spec.algorithm, []
    reference, kept = columns.reference_logprobs, columns.importance_kept
    assert reference is not None
    at = 0
    for number, (one, advantages) in enumerate(zip(done.sequences, naive_advantages(spec), strict=True)):
        for place, target in enumerate(one.tokens[one.prompt_len :].tolist()):
            trainer, engine = everything[at, target].item(), float(one.inference_logprobs[place])
            old = engine if algorithm.proximal_policy is ProximalPolicy.INFERENCE else trainer
            if algorithm.proximal_policy is ProximalPolicy.TRAINER and columns.old_logprobs is not None:
                old = columns.old_logprobs[at].item()
            entropy = -(everything[at] * everything[at].exp()).sum().item()
            counts, is_kept = bool(done.sampled[at]), kept is None or bool(kept[at])
            figures = (trainer, old, engine, advantages[place], counts, number, reference[at].item(), entropy, is_kept)
            tokens.append(Token(*figures))
            at += 1
    return tokens


@BY_CREDIT
@BY_LOSS
def test_the_gradient_at_observed_tokens_is_exactly_zero(algorithm: AlgorithmSpec, credit: TurnCredit) -> None:
    done = step(groups(), spec_of(algorithm, credit))
    gradient = done.rows.grad
    assert gradient is not None
    assert int((~done.sampled).sum()) == 19
    assert torch.count_nonzero(gradient[~done.sampled]) == 0
    assert (gradient[done.sampled] != 0).any(-1).sum() > 10


def test_a_learner_that_trains_what_was_observed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_loss_mask", lambda rollout, _: np.ones(len(rollout.tokens), bool))
    for promise in (
        test_the_gradient_at_observed_tokens_is_exactly_zero,
        test_the_loss_is_that_of_a_loop_over_sampled_tokens_which_alone_are_counted,
        test_a_step_is_that_of_the_same_episodes_without_what_they_observed,
    ):
        with pytest.raises(AssertionError):
            promise(ALL["dapo"], TurnCredit.TRAJECTORY)


@BY_CREDIT
@BY_LOSS
def test_the_loss_is_that_of_a_loop_over_sampled_tokens_which_alone_are_counted(
    algorithm: AlgorithmSpec, credit: TurnCredit
) -> None:
    spec = spec_of(algorithm, credit)
    done = step(groups(), spec)
    assert done.update.tokens == sum(rollout.sampled_tokens for rollout in rollouts_of(groups()))
    tokens = naive_tokens(done, spec)
    size = sum(abs(naive_total([token], algorithm)) for token in tokens if token.counts) / done.update.tokens
    assert done.update.loss == pytest.approx(naive_total(tokens, algorithm), rel=1e-5, abs=1e-5 * size)


@BY_CREDIT
@BY_LOSS
def test_a_step_is_that_of_the_same_episodes_without_what_they_observed(
    algorithm: AlgorithmSpec, credit: TurnCredit
) -> None:
    """Every figure, mismatch and clip fractions among them, and every gradient."""
    spec, short = (
        spec_of(algorithm, credit),
        [with_rollouts(g, list(map(squeezed, rollouts_of([g])))) for g in groups()],
    )
    one, other = step(groups(), spec), step(short, spec)
    assert one.update.metrics.keys() == other.update.metrics.keys() >= {"mismatch_kl_k1", "mismatch_kl_k3", LARGEST}
    for name, value in one.update.metrics.items():
        assert value == pytest.approx(other.update.metrics[name], rel=1e-6, abs=1e-9), name
    assert one.update.tokens == other.update.tokens
    assert one.update.loss == pytest.approx(other.update.loss, rel=1e-6, abs=1e-9)
    assert one.rows.grad is not None
    assert other.rows.grad is not None
    torch.testing.assert_close(one.rows.grad[one.sampled], other.rows.grad)


def test_mismatch_figures_are_means_of_a_loop_over_sampled_tokens() -> None:
    spec = spec_of(AlgorithmSpec())
    done = step(groups(), spec)
    ratios = [token.trainer - token.inference for token in naive_tokens(done, spec) if token.counts]
    assert done.update.metrics["mismatch_kl_k1"] == pytest.approx(-sum(ratios) / len(ratios), rel=1e-5)
    k3 = sum(float(np.expm1(ratio)) - ratio for ratio in ratios) / len(ratios)
    assert done.update.metrics["mismatch_kl_k3"] == pytest.approx(k3, rel=1e-5)
    assert done.update.metrics[LARGEST] == pytest.approx(max(map(abs, ratios)), rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critics_loss_is_that_of_a_loop_over_sampled_tokens_and_has_no_gradient_elsewhere(
    clip: float | None,
) -> None:
    spec = job_spec(
        algorithm={"preset": "ppo", "kl_coefficient": 0.0},
        critic={"value_clip": clip},
        learner={"max_tokens_per_micro_batch": 24},
    )
    assert spec.critic is not None
    sequences = assemble(groups(), spec)
    passes, whole = prepared(spec, sequences)
    rows, old = torch.randn(2, response_offsets(sequences)[-1], 1, generator=torch.manual_seed(5))
    values = np.split(old[:, 0].numpy(), response_offsets(sequences)[1:-1])
    made = estimate(replace(responses_of(sequences), values=values), spec.algorithm)
    assert made.returns is not None
    returns = torch.from_numpy(np.concatenate(made.returns))
    rows = rows.clone().requires_grad_()
    critic = Critic(cast("Any", Table(rows)), spec.critic, cast("Backend", OneRank()), passes)
    columns = Columns(torch.zeros(len(returns)), values=old[:, 0], returns=returns)
    update = critic.update(whole, columns, 0.0)
    sampled = torch.from_numpy(np.concatenate([s.loss_mask for s in sequences]))
    losses = []
    for value, before, target, counts in zip(
        rows[:, 0].tolist(), old[:, 0].tolist(), returns.tolist(), sampled.tolist(), strict=True
    ):
        near = value if clip is None else min(max(value, before - clip), before + clip)
        losses += [0.5 * max((value - target) ** 2, (near - target) ** 2)] if counts else []
    assert update.tokens == len(losses) == sum(rollout.sampled_tokens for rollout in rollouts_of(groups()))
    assert update.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert rows.grad is not None
    assert torch.count_nonzero(rows.grad[~sampled]) == 0
    assert torch.count_nonzero(rows.grad[sampled]) > 10


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_advantages_at_sampled_tokens_are_those_of_the_same_episodes_without_what_they_observed(
    estimator: AdvantageEstimator,
) -> None:
    algorithm = AlgorithmSpec(advantage_estimator=estimator, gamma=0.9, lam=0.8)
    made = []
    for judged in (groups(), [with_rollouts(g, list(map(squeezed, rollouts_of([g])))) for g in groups()]):
        masks = [rollout.sampled for rollout in rollouts_of(judged)]
        rewards = [reward for group in REWARDS for reward in group]
        draw = np.random.default_rng(9)
        values, penalties = [], []
        for mask in masks:
            of_response, of_penalty = np.full(len(mask), 50.0, np.float32), np.full(len(mask), 50.0)
            of_response[mask], of_penalty[mask] = draw.normal(size=(2, int(mask.sum())))
            values.append(of_response)
            penalties.append(of_penalty)
        ids = [number for number, group in enumerate(REWARDS) for _ in group]
        found = estimate(Responses(ids, rewards, masks, kl_penalties=penalties, values=values), algorithm)
        made.append([advantage[mask] for advantage, mask in zip(found.advantages, masks, strict=True)])
        assert all(np.isfinite(advantage).all() for advantage in found.advantages)
    for one, other in zip(*made, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@BY_CREDIT
def test_overlong_shaping_is_that_of_the_same_episodes_without_what_they_observed(credit: TurnCredit) -> None:
    spec = job_spec(
        rollout={"rollout_max_tokens": 8},
        algorithm={"overlong_buffer_enable": True, "overlong_buffer": 6, "turn_credit": credit},
    )
    short = [with_rollouts(g, list(map(squeezed, rollouts_of([g])))) for g in groups()]
    one, other = assemble(groups(), spec), assemble(short, spec)
    shaped = [s.reward for s in one]
    assert shaped == [s.reward for s in other] != [reward for group in REWARDS for reward in group]
    expected = [-min(max(r.sampled_tokens - 2, 0) / 6, 1.0) for r in rollouts_of(groups())]
    assert shaped == pytest.approx([r + p for r, p in zip(chain(*REWARDS), expected, strict=True)])
    for long, without in zip(one, other, strict=True):
        assert np.array_equal(long.advantage[long.loss_mask], without.advantage)
