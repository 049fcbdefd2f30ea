"""Reward models in processes of their own: real numbers for every response, and no harm from what the process does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.common.config.settings import Platform, Settings
from services.common.sandbox.pool import Sandbox
from services.common.spec.scorers import RewardModelSpec, Transform
from services.common.streams.types import Message, Verdict, VerdictStatus
from services.reward.reward_model import process as module
from services.reward.reward_model.process import ModelProcess
from services.reward.reward_model.reward_model import RewardModel, sigmoid
from tests.integration.reward.test_service import group
from tests.processes import is_at_work
from tests.tiny_classifier import SCORE, write_tiny_classifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 1.0
GRACE_S = 2.0
"""Of a machine that other tests keep busy."""
ODD = "tests.integration.reward.stand_in_classifier:Odd"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(prepare=[module.PREPARE], service="reward-model") as shared:
        yield shared


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = Settings(home=tmp_path_factory.mktemp("home"), reward_model_threads=1)
    write_tiny_classifier(made.models_dir / "tiny-reward")
    return made


@asynccontextmanager
async def opened(sandbox: Sandbox, settings: Settings, **spec: Any) -> AsyncIterator[RewardModel]:
    made = RewardModelSpec.model_validate({"path": "tiny-reward"} | spec)
    async with RewardModel("rm", made, settings, sandbox, max_chars=4000) as model:
        yield model


@asynccontextmanager
async def odd(sandbox: Sandbox, path: str = "odd", **spec: Any) -> AsyncIterator[RewardModel]:
    """One whose process is the stand-in, which needs no torch."""
    made = RewardModelSpec(path=path, timeout_s=LIMIT_S, **spec)
    model = RewardModel("rm", made, Settings(), sandbox, max_chars=4000)
    model._process = ModelProcess(made, Settings(reward_model_memory_gib=4), sandbox, target=ODD)
    async with model:
        yield model


def pid_of(model: RewardModel) -> int:
    child = model._process._child
    assert child is not None
    return child.pid


def rewards(verdicts: list[Verdict]) -> list[float | None]:
    return [verdict.reward for verdict in verdicts]


async def test_a_real_classifier_scores_every_response_in_order_whatever_the_batch(
    sandbox: Sandbox, settings: Settings
) -> None:
    texts = ["42", "forty-two", "", "x" * 300 + "7", "7 \ud800", "<|pad|>", *map(str, range(40))]
    right = [text[-1:].isdigit() for text in texts]
    async with opened(sandbox, settings, batch_tokens=1024, max_tokens=512) as model:
        many = await model.score(group(1, *texts))
        single = [(await model.score(group(1, text)))[0] for text in texts[:6]]
        assert model.resident_bytes > 50 * 2**20
    assert {verdict.status for verdict in many} == {VerdictStatus.SCORED}
    assert [verdict.accuracy for verdict in many] == [float(ends) for ends in right]
    expected = [SCORE if ends else -SCORE for ends in right]
    assert rewards(many) == pytest.approx(expected, abs=1e-3)
    assert rewards(single) == pytest.approx(rewards(many)[:6], abs=1e-6)


async def test_its_transform_threshold_and_limit_of_tokens_hold(sandbox: Sandbox, settings: Settings) -> None:
    async with opened(
        sandbox, settings, transform="sigmoid", accuracy_from=0.99, max_tokens=16, batch_tokens=64
    ) as model:
        long, short = await model.score(group(1, "1" + "x" * 100, "1"))
    assert model._spec.transform is Transform.SIGMOID
    assert rewards([long, short]) == pytest.approx([sigmoid(-SCORE), sigmoid(SCORE)], abs=1e-4)
    assert [long.accuracy, short.accuracy] == [0.0, 0.0]
    assert long.detail.endswith(", the last 16 of 115 tokens")


async def test_the_reward_models_of_a_job_share_the_memory_that_it_may_take(sandbox: Sandbox) -> None:
    spec, settings = RewardModelSpec(path="tiny-reward"), Settings(reward_model_memory_gib=6)
    shares = [ModelProcess(spec, settings, sandbox, of=count)._limits.memory_mib for count in (1, 3)]
    assert shares == [6144, 2048]
    on_gpu = ModelProcess(spec, Settings(reward_model_platform=Platform.CUDA), sandbox, of=3)
    assert on_gpu._limits.memory_mib > 2**28, "drivers reserve addresses without measure"


async def test_a_directory_that_is_no_reward_model_is_a_failure_with_its_reason(
    sandbox: Sandbox, settings: Settings
) -> None:
    folder = write_tiny_classifier(settings.models_dir / "headless", num_hidden_layers=2)
    async with opened(sandbox, settings, path="headless") as model:
        [verdict] = await model.score(group(1, "42"))
    assert folder.is_dir()
    assert verdict.status is VerdictStatus.FAILED
    assert "its weights lack" in verdict.detail


async def test_its_process_begins_with_the_job_and_ends_with_it(sandbox: Sandbox) -> None:
    async with odd(sandbox) as model:
        while model.loading or model._process._child is None:
            await asyncio.sleep(0.01)
        pid = pid_of(model)
        assert is_at_work(pid)
    await gone(pid)


async def gone(pid: int) -> None:
    deadline = time.monotonic() + 5.0
    while is_at_work(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_number_that_is_not_finite_is_a_failure_and_the_others_are_scored(sandbox: Sandbox) -> None:
    async with odd(sandbox) as model:
        found = await model.score(group(1, "abc", "nan", "refused", "ab"))
    assert rewards(found) == [3.0, None, None, 2.0]
    assert [verdict.status for verdict in found[1:3]] == [VerdictStatus.FAILED] * 2
    assert "nan" in found[1].detail
    assert found[2].detail == "it refuses"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("die", "ended its process"),
        ("raise", "device-side assert"),
        ("lie", "no reply"),
        ("stop", "a signal stopped it"),
    ],
)
async def test_a_process_that_fails_is_replaced_and_its_batch_fails(text: str, words: str, sandbox: Sandbox) -> None:
    async with odd(sandbox) as model:
        assert rewards(await model.score(group(1, "abc"))) == [3.0]
        [verdict] = await model.score(group(1, text))
        assert (verdict.status, verdict.reward) == (VerdictStatus.FAILED, None)
        assert words in verdict.detail
        assert rewards(await model.score(group(1, "ab", "a"))) == [2.0, 1.0]


@pytest.mark.parametrize("text", ["hang", "hang in the template"])
async def test_a_batch_holds_the_process_no_longer_than_its_limit(text: str, sandbox: Sandbox) -> None:
    async with odd(sandbox) as model:
        await model.score(group(1, "abc"))
        first, began = pid_of(model), time.monotonic()
        scoring = asyncio.create_task(model.score(group(1, text)))
        while is_at_work(first):
            await asyncio.sleep(0.01)
        assert LIMIT_S <= time.monotonic() - began + 0.1 < LIMIT_S + GRACE_S
        [verdict] = await scoring
        assert "took longer than 1 s" in verdict.detail
        assert rewards(await model.score(group(1, "ab"))) == [2.0]


async def test_a_process_that_is_killed_costs_no_verdict(sandbox: Sandbox, tmp_path: Path) -> None:
    async with odd(sandbox) as model:
        assert rewards(await model.score(group(1, f"once:{tmp_path}/died"))) == [float(len(f"once:{tmp_path}/died"))]
        os.kill(pid_of(model), signal.SIGKILL)
        assert rewards(await model.score(group(1, "abc", "ab"))) == [3.0, 2.0]


async def test_a_model_that_does_not_load_fails_checks_at_once_until_it_is_tried_again(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with odd(sandbox, "broken") as model:
        [verdict] = await model.score(group(1, "abc"))
        assert "the reward model broken was not loaded: model.path: broken: no weights" in verdict.detail
        began = time.monotonic()
        await asyncio.gather(*(model.score(group(1, "abc")) for _ in range(20)))
        assert time.monotonic() - began < GRACE_S
        monkeypatch.setattr(module, "RELOAD_PAUSE_S", 0.0)
        model._process._arguments = (RewardModelSpec(path="odd").model_dump_json(), *model._process._arguments[1:])
        assert rewards(await model.score(group(1, "abc"))) == [3.0]


async def test_loading_has_a_limit_of_its_own(sandbox: Sandbox) -> None:
    began = time.monotonic()
    async with odd(sandbox, "slow", load_timeout_s=1.5) as model:
        [verdict] = await model.score(group(1, "abc"))
    assert 1.5 <= time.monotonic() - began < 1.5 + GRACE_S
    assert "was not loaded: took longer than 1.5 s" in verdict.detail


async def test_a_cancelled_group_leaves_nothing_waiting(sandbox: Sandbox) -> None:
    async with odd(sandbox) as model:
        await model.score(group(1, "abc"))
        scoring = asyncio.create_task(model.score(group(1, "hang")))
        await asyncio.sleep(0.2)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        assert model.queued == 0
        assert rewards(await model.score(group(1, "ab"))) == [2.0]


async def test_a_prompt_of_several_messages_goes_through_the_models_own_template(
    sandbox: Sandbox, settings: Settings
) -> None:
    prompt = (Message("system", "Add."), Message("user", "2 + 3 ="))
    async with opened(sandbox, settings) as model:
        assert rewards(await model.score(group(1, "5", "five", prompt=prompt))) == pytest.approx([3, -3], abs=1e-3)


async def test_the_services_own_process_imports_no_torch() -> None:
    code = "import sys, services.reward.service; print('torch' in sys.modules or 'transformers' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0].strip() == b"False"
