"""The engine on real vLLM: stamps, activation, fencing. Its weights say with every token which version they are."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.common.config.settings import Platform
from services.common.errors import PromptError, WeightSyncError
from services.common.service.process_tree import is_running
from services.common.spec.job import JobSpec
from services.common.streams.types import Message, Purpose, RolloutGroup, Task
from services.common.weights.snapshot import PolicyVersion
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import ChatSampling
from services.rollout.engine.update import EngineError
from services.rollout.sampling.sampler import Sampler
from tests.integration.rollout.conftest import VOCAB, StageWeights, Tensors, that_say

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

LAST = "model.layers.1.mlp.down_proj.weight"
FIRST = 40
"""The token that version 0 says; version n says FIRST + n."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path, spec: JobSpec) -> AsyncIterator[Engine]:
    made = Engine(Platform.CPU)
    await made.start(model_dir, spec)
    yield made
    await made.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def versions() -> AsyncIterator[Numbers]:
    yield Numbers()


class Numbers:
    """Hands out versions, each newer than the last, over all tests of the module."""

    def __init__(self) -> None:
        self.n = -1

    def next(self) -> int:
        self.n += 1
        return self.n


def a_task(**changes: object) -> Task:
    task = Task(
        job_id="job-1", lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(Message("user", "2 + 3 ="),),
        data_source="test", ground_truth="5", extra_info={}, group_size=4, temperature=1.0, max_tokens=24,
        min_policy_version=0, timeout_s=120.0,
    )  # fmt: skip
    return dataclasses.replace(task, **changes)  # type: ignore[arg-type]


def check_stamps(group: RolloutGroup) -> int:
    """Every token is the one that its stamped version says; returns the number of spans."""
    assert group.failure is None, group.failure
    for rollout in group.rollouts:
        bounds = [*(span.start for span in rollout.versions), len(rollout.tokens)]
        for span, end in zip(rollout.versions, bounds[1:], strict=True):
            said = set(rollout.tokens[span.start : end].tolist())
            assert said == {FIRST + span.policy_version}, f"{rollout.versions}: {rollout.tokens.tolist()}"
    return sum(len(rollout.versions) for rollout in group.rollouts)


async def test_every_token_carries_the_version_that_sampled_it(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights
) -> None:
    first = versions.next()
    await engine.activate(stage_weights(1, first, that_say(FIRST + first, weights)))
    sampler = Sampler(engine, "r0")
    running = [asyncio.create_task(sampler.sample(a_task(group_id=i, group_size=4, max_tokens=200))) for i in range(6)]
    done = []
    for _ in range(4):
        await asyncio.sleep(0.25)
        n = versions.next()
        done.append(await engine.activate(stage_weights(1, n, that_say(FIRST + n, weights))))
        assert engine.version == PolicyVersion(1, n)
    groups = await asyncio.gather(*running)
    spans = [check_stamps(group) for group in groups]
    assert max(spans) > 4, "no update happened while requests were in flight"
    assert all(0 < activation.apply_s < activation.pause_s for activation in done)
    assert all(len(rollout.tokens) == len(rollout.logprobs) == 200 for group in groups for rollout in group.rollouts)
    assert check_stamps(await sampler.sample(a_task())) == 4, "a new request samples with the newest version only"


async def test_logprobs_are_those_of_the_weights_at_the_sampling_temperature(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights, model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    await engine.activate(stage_weights(1, versions.next(), weights))
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for temperature in (1.0, 0.7):
        group = await Sampler(engine, "r0").sample(a_task(group_size=8, temperature=temperature))
        assert group.failure is None
        every = []
        for rollout in group.rollouts:
            ids = torch.tensor([[*group.prompt_tokens.tolist(), *rollout.tokens.tolist()]])
            with torch.no_grad():
                logits = reference(ids).logits[0, len(group.prompt_tokens) - 1 : -1] / temperature
            expected = logits.log_softmax(-1).gather(-1, ids[0, len(group.prompt_tokens) :, None]).squeeze(-1).numpy()
            assert np.abs(expected - rollout.logprobs).mean() < 0.03  # the engine computes in bfloat16
            every.append(expected)
        assert np.concatenate(every).std() > 0.3, "these weights could not tell right from wrong"


async def test_a_file_that_is_not_what_its_manifest_says_is_refused_before_the_pause(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights
) -> None:
    good = versions.next()
    await engine.activate(stage_weights(1, good, that_say(FIRST + good, weights)))
    staged = stage_weights(1, versions.next(), that_say(50, weights))
    broken = bytearray(staged.path.read_bytes())
    broken[-7] ^= 1
    staged.path.write_bytes(broken)
    with pytest.raises(WeightSyncError, match="do not match their digest"):
        await engine.activate(staged)
    assert engine.version == PolicyVersion(1, good)
    check_stamps(await Sampler(engine, "r0").sample(a_task()))


async def test_a_version_that_leaves_a_tensor_out_is_refused(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights
) -> None:
    without_head = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight is missing"):
        await engine.activate(stage_weights(1, versions.next(), without_head))


async def test_an_older_version_is_never_activated(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights
) -> None:
    n = versions.next()
    await engine.activate(stage_weights(1, n, that_say(FIRST + n, weights)))
    with pytest.raises(WeightSyncError, match="not newer"):
        await engine.activate(stage_weights(1, n, weights))
    assert engine.version == PolicyVersion(1, n)


async def test_a_version_of_another_shape_is_refused(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights
) -> None:
    misshapen = weights | {LAST: torch.zeros(3, 5, dtype=torch.bfloat16)}
    with pytest.raises(WeightSyncError, match=r"down_proj\.weight is \(3, 5\), not \(128, 256\)"):
        await engine.activate(stage_weights(1, versions.next(), misshapen))


async def test_a_load_that_fails_brings_the_weights_before_back(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = versions.next()
    await engine.activate(stage_weights(1, good, that_say(FIRST + good, weights)))
    sampling = asyncio.create_task(Sampler(engine, "r0").sample(a_task(max_tokens=150)))
    await asyncio.sleep(0.1)
    vanishing = stage_weights(1, versions.next(), that_say(50, weights))
    assert engine._switch is not None
    pause = engine._switch._pause

    async def pause_and_lose_the_file() -> None:
        await pause()
        vanishing.path.unlink()

    monkeypatch.setattr(engine._switch, "_pause", pause_and_lose_the_file)
    with pytest.raises(WeightSyncError, match="the weights before are back"):
        await engine.activate(vanishing)
    monkeypatch.undo()
    assert engine.version == PolicyVersion(1, good)
    check_stamps(await sampling)
    n = versions.next()
    await engine.activate(stage_weights(1, n, that_say(FIRST + n, weights)))
    check_stamps(await Sampler(engine, "r0").sample(a_task()))


async def test_a_group_that_takes_too_long_is_aborted_and_fails(engine: Engine) -> None:
    group = await Sampler(engine, "r0").sample(a_task(group_size=16, max_tokens=240, timeout_s=0.05))
    assert group.failure is not None
    assert "within 0.05 s; the group needs 16" in group.failure
    assert group.rollouts == ()
    assert engine.requests == 0
    check_stamps(await Sampler(engine, "r0").sample(a_task()))


async def test_a_prompt_that_cannot_be_used_fails_its_group_only(engine: Engine) -> None:
    sampler = Sampler(engine, "r0")
    group = await sampler.sample(a_task(prompt=(Message("user", "1" * 300),)))
    assert group.failure is not None
    assert "302 tokens and max_tokens 24 exceed the model's 256" in group.failure
    group = await sampler.sample(a_task(prompt=(Message("system", "be brief"), Message("user", "1"))))
    assert group.failure is not None
    assert "no system messages" in group.failure
    with pytest.raises(
        PromptError, match="the engine refuses the prompt"
    ):  # a tokenizer with more tokens than the model
        await anext(engine.generate([VOCAB + 5], count=2, temperature=1.0, max_tokens=4))
    assert engine.requests == 0
    check_stamps(await sampler.sample(a_task()))


async def test_a_cancelled_activation_never_leaves_the_engine_paused(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights
) -> None:
    n = versions.next()
    activating = asyncio.create_task(engine.activate(stage_weights(1, n, that_say(FIRST + n, weights))))
    await asyncio.sleep(0.01)
    activating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await activating
    assert engine.version == PolicyVersion(1, n)
    check_stamps(await Sampler(engine, "r0").sample(a_task()))


async def test_the_engine_stays_up_for_a_job_that_needs_the_same(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights, model_dir: Path, spec: JobSpec
) -> None:
    before = [child.pid for child in engine.processes]
    await engine.start(model_dir, spec)
    assert [child.pid for child in engine.processes] == before
    assert engine.version is None, "the next job's weights are not known yet"
    n = versions.next()
    await engine.activate(stage_weights(2, n, that_say(FIRST + n, weights)))
    check_stamps(await Sampler(engine, "r0").sample(a_task(lineage=2)))


async def test_half_applied_weights_are_never_sampled_and_no_process_stays(
    engine: Engine, versions: Numbers, weights: Tensors, stage_weights: StageWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def let_pass(*_: object) -> None:
        """Stands for a fault that no check foresees."""

    assert engine._switch is not None
    monkeypatch.setattr(engine._switch, "_verify", let_pass)
    sampling = asyncio.create_task(Sampler(engine, "r0").sample(a_task(lineage=2, max_tokens=200)))
    await asyncio.sleep(0.1)
    misshapen = weights | {LAST: torch.zeros(3, 5, dtype=torch.bfloat16)}
    with pytest.raises(EngineError, match="half applied"):
        await engine.activate(stage_weights(2, versions.next(), misshapen))
    done, _ = await asyncio.wait([sampling], timeout=1.0)
    assert not done, "it went on sampling"
    processes = [process for child in engine.processes for process in [child, *child.children(recursive=True)]]
    assert processes
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    await engine.aclose()
    assert not any(is_running(process) for process in processes)


async def test_an_engine_that_is_not_started_refuses_and_counts_nothing() -> None:
    engine = Engine(Platform.CPU)
    with pytest.raises(EngineError, match="not started"):
        await anext(engine.generate([1], count=4, temperature=1.0, max_tokens=1))
    with pytest.raises(EngineError, match="not started"):
        await anext(engine.chat([1], ChatSampling(max_tokens=1, temperature=1.0, top_p=1.0)))
    assert (engine.requests, engine.chats) == (0, 0)
