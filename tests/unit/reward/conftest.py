"""A package of odd verifiers, installed where only the tests' processes find it; pools; rollout groups."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from services.common.config.plugins import offered
from services.common.streams.types import FinishReason, Message, Purpose, Rollout, RolloutGroup, Task, VersionSpan
from services.reward.pool.messages import Check
from services.reward.pool.pool import Pool
from tests.unit.reward import odd_package

PoolMaker = Callable[..., AbstractAsyncContextManager[Pool]]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the odd verifiers installed."""
    return odd_package.install(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def installed_here(plugins: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The odd verifiers are installed in this process, too."""
    monkeypatch.syspath_prepend(plugins["PYTHONPATH"].split(os.pathsep)[0])
    offered.cache_clear()
    yield
    offered.cache_clear()


@pytest.fixture(scope="module")
def pool_of(plugins: dict[str, str]) -> PoolMaker:
    """Makes a running pool that knows the odd verifiers."""

    @asynccontextmanager
    async def make(workers: int = 1, **settings: Any) -> AsyncIterator[Pool]:
        async with Pool(workers, environment=plugins, **settings) as pool:
            yield pool

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(pool_of: PoolMaker) -> AsyncIterator[Pool]:
    """One worker, shared by a module's tests: starting a pool takes longer than most of them."""
    async with pool_of(1) as shared:
        yield shared


def check(
    verifier: str, response: str = "", ground_truth: str = "1", *, timeout_s: float = 5.0, **extra_info: Any
) -> Check:
    return Check(verifier, response, ground_truth, "somewhere", extra_info, timeout_s)


@pytest.fixture(name="check")
def check_maker() -> Callable[..., Check]:
    """Makes checks from the verifier's name and the response."""
    return check


@pytest.fixture
def any_group() -> RolloutGroup:
    """A group of two rollouts."""
    task = Task(
        "job", 1, 0, 1, Purpose.TRAIN, (Message("user", "6 × 7 ="),), "openai/gsm8k", "42", {}, 2, 1.0, 16, 0, 60.0
    )
    spans = (VersionSpan(0, 0),)
    rollouts = tuple(Rollout(bytes(8), bytes(8), text, FinishReason.STOP, spans) for text in ("#### 42", "#### 41"))
    return RolloutGroup(task, "rollout-1", bytes(12), rollouts, 0.1)
