"""Environment `python` in the processes of episodes: the service's setting reaches them, and their own limits hold programs too."""

from __future__ import annotations

import pytest

from services.common.config.settings import Programs, Settings
from services.common.environments.types import Reason
from services.common.programs.sandbox import isolation_fault
from services.common.sandbox.pool import Sandbox
from services.environment import switches
from services.environment.players import Call, EpisodeFailed, Players
from tests.integration.environment.children import all_end

CALL = Call("python", {}, 1, {"question": "6 * 7?", "answer": 42}, queue_s=60.0, step_timeout_s=60.0)


def sandbox(settings: Settings) -> Sandbox:
    return Sandbox(prepare=["services.environment.player:prepare"], environment=switches.variables(settings))


async def test_programs_run_in_an_episodes_process_and_nothing_of_them_is_left() -> None:
    if fault := isolation_fault():
        pytest.skip(fault)
    async with sandbox(Settings(code_environment=Programs.ISOLATED)) as made:
        players = Players(made, places=1)
        async with players.episode(CALL) as episode:
            await episode.reset()
            (message,) = (await episode.step("```\nprint(6 * 7)\n```")).messages
            assert (message.role, message.content) == ("tool", "42")
            assert (await episode.step("#### 42")).reward == 1.0
        await players.end_idle(after_s=0.0)
        assert made.pid is not None
        assert await all_end(made.pid)


async def test_where_programs_are_off_the_episode_is_refused_for_good() -> None:
    async with sandbox(Settings()) as made:
        with pytest.raises(EpisodeFailed, match="MILLRACE_CODE_ENVIRONMENT=1") as failure:
            async with Players(made, places=1).episode(CALL):
                pass
    assert (failure.value.reason, failure.value.permanent) == (Reason.CONFIG, True)
