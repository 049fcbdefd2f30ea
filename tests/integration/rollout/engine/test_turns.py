"""Episodes on real vLLM: each turn is prompted with the very tokens of the journal, and the learner computes what the engine computed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from services.common.config.settings import Platform
from services.common.environments.types import Observation
from services.common.jobs.folder import SPEC_FILE
from services.common.models.prompts import PromptEncoder
from services.common.spec.job import JobSpec, dump_spec
from services.common.streams.codec import decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import (
    EnvironmentCall,
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Verdict,
    VerdictStatus,
)
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import BatchRecord, Journal
from services.rollout.engine.engine import Engine
from services.rollout.sampling.sampler import Sampler
from tests.integration.learner.rank_runs import HERE as RANKS
from tests.integration.learner.rank_runs import run
from tests.integration.rollout.conftest import StageWeights, Tensors

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}<eos>{% else %}<user>{{ m.role }} {{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The engine stops at its end of a turn."""
GROUPS, SIZE, MOST_TURNS, TURN_TOKENS = 3, 8, 5, 24
"""In each of two steps: the first of one version of the weights, the second while they change."""
CALL = EnvironmentCall(
    "talk", {}, seed=0, max_turns=MOST_TURNS, max_turn_tokens=TURN_TOKENS, max_observation_tokens=64, step_timeout_s=10.0
)  # fmt: skip


@dataclass
class Talk:
    """Answers with the beginning of the reply, as a user and as a tool in turn, in some turns with two messages; ends after `turns`."""

    seed: int
    turns: int
    played: int = 0

    async def reset(self) -> Observation:
        return Observation((Message("user", f"game {self.seed}?"),))

    async def step(self, reply: str) -> Observation:
        self.played += 1
        if self.played == self.turns:
            return Observation((), done=True, reward=float(self.turns % 2))
        said = Message("user" if self.played % 2 else "tool", f"{self.played}: {reply[: self.played + 2]}")
        return Observation((said,) if self.played % 3 else (said, Message("user", "well?")))


@dataclass
class Talks:
    """The environments of all groups; the episodes of a group differ in length."""

    opened: Counter[int] = field(default_factory=Counter)

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[Talk]:
        self.opened[task.group_id] += 1
        yield Talk(task.group_id, 2 + self.opened[task.group_id] % (MOST_TURNS - 1))


def digest(token_ids: Iterable[int]) -> str:
    return hashlib.sha256(np.fromiter(token_ids, "<i4").tobytes()).hexdigest()


@dataclass
class Requests:
    """What vLLM was prompted with: digests of the ids of each request, and of those that its outputs name."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    """With the number of completions."""
    answered: list[str] = field(default_factory=list)

    def record(self, llm: Any) -> None:
        """From now on."""
        generate = llm.generate

        async def recorded(prompt: Any, parameters: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
            self.asked.append((digest(prompt["prompt_token_ids"]), parameters.n))
            named = set()
            async with aclosing(generate(prompt, parameters, request_id, **options)) as outputs:
                async for output in outputs:
                    named.add(digest(output.prompt_token_ids))
                    yield output
            self.answered += named

        llm.generate = recorded


@dataclass(frozen=True)
class Played:
    """Two steps of episodes."""

    folder: Path
    steps: list[list[ScoredGroup]]
    """From the journal."""
    requests: Requests

    def turns(self) -> Iterator[tuple[RolloutGroup, Rollout, int, int]]:
        """Of all episodes, with the turn's number and where its sampled tokens begin."""
        for group in (scored.group for step in self.steps for scored in step):
            for rollout in group.rollouts:
                for number, start, _ in spans(rollout):
                    yield group, rollout, number, start


def spans(rollout: Rollout) -> Iterator[tuple[int, int, int]]:
    """Number, first and last (exclusive) sampled token of each turn."""
    at = 0
    for number, turn in enumerate(rollout.turns, start=1):
        start = at + turn.observed
        at = start + turn.sampled
        yield number, start, at


def job_spec() -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"path": "tiny", "dtype": "float32", "chat_template": TEMPLATE},
            "data": {"train": {"source": "environment:talk"}},
            "environment": {"max_turns": MOST_TURNS, "max_turn_tokens": TURN_TOKENS},
            "reward": {"verifiers": {"*": "environment"}},
            "rollout": {
                "group_size": SIZE,
                "rollout_max_tokens": 200,
                "max_concurrent_groups": 8,
                "kv_cache_gib": 0.25,
            },
            "learner": {"lr_warmup_steps": 0, "max_tokens_per_micro_batch": 1024},
            "algorithm": {"filter_groups_train_batch_size": GROUPS},
        }
    )


def a_task(group_id: int) -> Task:
    return Task(
        job_id="job-1", lineage=1, group_id=group_id, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source="environment:talk",
        ground_truth="", extra_info={}, group_size=SIZE, temperature=1.0, max_tokens=200, min_policy_version=0, timeout_s=300.0,
        environment=CALL,
    )  # fmt: skip


def judged(group: RolloutGroup) -> ScoredGroup:
    """As the verifier `environment` judges it."""
    assert group.failure is None, group.failure
    assert len(group.rollouts) == SIZE
    verdicts = [
        Verdict(VerdictStatus.SCORED, one.outcome.reward, one.outcome.accuracy, "environment")
        if one.outcome is not None
        else Verdict(VerdictStatus.SCORED, 0.0, 0.0, "environment")
        for one in group.rollouts
    ]
    return ScoredGroup(group, tuple(verdicts), 0.0)


def float32(tensors: Tensors, *, scale: float = 1.0) -> Tensors:
    return {name: tensor.float() * scale for name, tensor in tensors.items()}


def without_text(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(rollout.without_text for rollout in group.rollouts))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(
    model_dir: Path, weights: Tensors, stage_weights: StageWeights, tmp_path_factory: pytest.TempPathFactory
) -> Played:
    """Two steps' groups, all at once in each; during the second the weights change four times."""
    spec, engine, requests = job_spec(), Engine(Platform.CPU), Requests()
    await engine.start(model_dir, spec)
    try:
        await engine.activate(stage_weights(1, 0, float32(weights)))
        requests.record(engine._llm)
        sampler = Sampler(engine, "r0", worlds=Talks())
        steps = [await asyncio.gather(*(sampler.sample(a_task(group)) for group in range(GROUPS)))]
        second = [asyncio.create_task(sampler.sample(a_task(GROUPS + group))) for group in range(GROUPS)]
        for version in range(1, 5):
            await asyncio.sleep(0.4)
            await engine.activate(stage_weights(1, version, float32(weights, scale=1.0 + version / 100)))
        steps.append(await asyncio.gather(*second))
    finally:
        await engine.aclose()
    folder = tmp_path_factory.mktemp("job")
    return Played(folder, journalled(folder, spec, steps), requests)


def journalled(folder: Path, spec: JobSpec, steps: list[list[RolloutGroup]]) -> list[list[ScoredGroup]]:
    """The groups as they come back from a journal, which stays in the folder."""
    (folder / SPEC_FILE).write_text(dump_spec(spec))
    journal = Journal(folder / JOURNAL_DIR)
    for number, groups in enumerate(steps, start=1):
        payloads = tuple(encode(judged(without_text(group)), MIN_ENTRY_BYTES) for group in groups)
        journal.append(BatchRecord(number, 1, payloads, (), number * GROUPS))
    return [
        [decode(ScoredGroup, payload, MIN_ENTRY_BYTES) for payload in record.groups]
        for record in Journal(folder / JOURNAL_DIR).records()
    ]


async def test_every_turn_was_prompted_with_the_journals_prompt_and_tokens_up_to_it(played: Played) -> None:
    first: Counter[str] = Counter()
    later: Counter[str] = Counter()
    for group, rollout, number, start in played.turns():
        (first if number == 1 else later)[digest([*group.prompt_tokens, *rollout.tokens[:start]])] += 1
    asked_first = Counter({ids: count for ids, count in played.requests.asked if count == SIZE})
    assert asked_first == first
    assert Counter(ids for ids, count in played.requests.asked if count == 1) == later
    assert Counter(played.requests.answered) == Counter(ids for ids, _ in played.requests.asked), "as vLLM names them"
    assert sum(later.values()) > 2 * 2 * GROUPS * SIZE - 1, "most episodes have several turns"


async def test_what_was_prompted_has_each_end_of_a_turn_a_weight_sync_and_text_that_says_less_than_the_tokens(
    played: Played, model_dir: Path
) -> None:
    encoder = PromptEncoder(model_dir, TEMPLATE)
    cut = ended = retokenised = 0
    for group, rollout, number, start in played.turns():
        if number == 1:
            continue
        before, observed = rollout.turns[number - 2], rollout.turns[number - 1].observed
        bridge = rollout.tokens[start - observed : start].tolist()
        if before.finish_reason is FinishReason.LENGTH:
            cut += bridge[0] == encoder.end_of_turn
        else:
            ended += bridge[0] != encoder.end_of_turn
        ids = [*group.prompt_tokens.tolist(), *rollout.tokens[:start].tolist()]
        retokenised += encoder.token_ids(encoder.decode_raw([ids])[0]) != ids
    turns = sum(number > 1 for *_, number, _ in played.turns())
    assert cut + ended == turns, "the end of a turn that was cut is observed, and of no other"
    assert min(cut, ended) > 3
    assert retokenised > turns / 2, "ids made of the text again would be others"
    rollouts = [one for scored in played.steps[1] for one in scored.group.rollouts]
    assert any(len(one.versions) > 1 for one in rollouts), "no weights changed within an episode"


LogRatios = dict[int, list[npt.NDArray[np.float64]]]
"""Turn → of each episode that has it, log π_trainer − log π_inference of its sampled tokens."""


def by_turn(rollouts: list[Rollout], logprobs: npt.NDArray[np.float32]) -> LogRatios:
    found, at = defaultdict(list), 0
    for rollout in rollouts:
        own = logprobs[at : at + len(rollout.tokens)].astype(np.float64)
        at += len(own)
        for number, start, end in spans(rollout):
            found[number].append(own[start:end] - rollout.logprobs[start:end].astype(np.float64))
    assert at == len(logprobs)
    return dict(found)


def k1_and_k3(log_ratios: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Means over tokens."""
    return float(-log_ratios.mean()), float((np.expm1(log_ratios) - log_ratios).mean())


def beyond_the_first_turns_range(turns: LogRatios) -> list[int]:
    """Later turns whose k1 or k3, over all their tokens, is farther from 0 than that of every single episode's first turn."""
    most = np.abs([k1_and_k3(one) for one in turns[1]]).max(axis=0)
    return [number for number in sorted(turns)[1:] if (np.abs(k1_and_k3(np.concatenate(turns[number]))) > most).any()]


async def test_the_mismatch_of_later_turns_is_within_the_range_of_the_first(played: Played, model_dir: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    script = [str(RANKS / "turn_ranks.py"), str(played.folder), str(model_dir), str(played.folder)]
    await asyncio.to_thread(run, [*launch, *script])
    found = np.load(played.folder / "logprobs.npz")
    rollouts = [one for scored in played.steps[0] for one in scored.group.rollouts]
    turns = by_turn(rollouts, found["logprobs"])
    assert sorted(turns) == list(range(1, MOST_TURNS + 1))
    assert beyond_the_first_turns_range(turns) == []
    assert max(np.abs(one).max() for turn in turns.values() for one in turn) < 1e-4
    misheard = by_turn(rollouts, found["misheard"])
    assert beyond_the_first_turns_range(misheard) == list(range(2, MOST_TURNS + 1)), "it must be found out"
    assert np.abs(np.concatenate(misheard[1]) - np.concatenate(turns[1])).max() < 1e-4

    stats = json.loads((played.folder / "stats.json").read_text())
    sampled = np.concatenate([rollout.sampled for rollout in rollouts])
    engine = np.concatenate([rollout.logprobs for rollout in rollouts])[sampled].astype(np.float64)
    log_ratio = found["logprobs"][sampled].astype(np.float64) - engine
    assert stats["loss_tokens"] == sampled.sum() == sum(rollout.sampled_tokens for rollout in rollouts)
    assert stats["mean_abs_logprob_difference"] == pytest.approx(np.abs(log_ratio).mean(), rel=1e-4)
    assert stats["mismatch_kl_k1"] == pytest.approx(-log_ratio.mean(), rel=1e-3, abs=1e-10)
