"""How often a job's ranks are started again: a step done gives all restarts back; torchelastic itself is scripted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.config.settings import Settings
from services.common.service.lifecycle import Drain
from services.learner.agent.agent import MAX_RESTARTS, Agent

LAST = 9


class Job:
    """A job of LAST steps whose launches end with the given codes, each after some steps."""

    def __init__(self, tmp_path: Path, *launches: tuple[int, int]) -> None:
        self.step, self._left = 0, list(launches)
        self.agent = Agent(Settings(home=tmp_path), cast("Any", None), Drain(), tmp_path / "metrics", 0)
        self.agent._store = cast("Any", self)
        self.agent._restorer = cast("Any", self)
        self.agent._launch = self._launch  # type: ignore[method-assign,assignment]

    async def restore_lost(self) -> list[str]:
        return []

    async def find(self, _: str) -> Any:
        return SimpleNamespace(step=self.step, state=SimpleNamespace(ended=False))

    async def _launch(self, _: object) -> int:
        code, steps = self._left.pop(0)
        self.step += steps
        return code

    async def run(self) -> int:
        return await self.agent._run_ranks(cast("Any", SimpleNamespace(id="job-1")))


async def test_a_launch_that_did_a_step_is_repeated_however_often(tmp_path: Path) -> None:
    job = Job(tmp_path, *[(1, 1)] * LAST, (0, 0))
    assert await job.run() == 0
    assert job.step == LAST


async def test_restarts_in_vain_fail_the_job(tmp_path: Path) -> None:
    assert await Job(tmp_path, (1, 3), (1, 0)).run() == 1


@pytest.mark.parametrize("killed", [1, MAX_RESTARTS])
async def test_a_launcher_that_was_killed_is_started_again(tmp_path: Path, killed: int) -> None:
    assert await Job(tmp_path, *[(-9, 0)] * killed, (0, LAST)).run() == 0


async def test_a_launcher_that_is_killed_for_ever_is_given_up(tmp_path: Path) -> None:
    assert await Job(tmp_path, *[(-9, 0)] * (MAX_RESTARTS + 1)).run() == -9
