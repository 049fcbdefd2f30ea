"""Trial of a job's environments: an environment server begins one episode of each section, and what it says first is kept.

Whether there is such an environment, and whether it takes its settings, only the servers know that have it installed.
"""

from __future__ import annotations

import asyncio

from services.common.data.environments import EnvironmentSource, environment_call
from services.common.environments.types import EnvironmentFailed, Observation, Worlds
from services.common.errors import ConfigError
from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec
from services.common.streams.types import Purpose, Task


class NotTried(Exception):  # noqa: N818  named after what happened
    """No environment server could begin an episode in time; nothing is known of the settings."""


async def first_observation(
    spec: JobSpec, section: str, source: DataSourceSpec, worlds: Worlds | None, seconds: float
) -> Observation:
    """What the environment of `data.<section>` says first, in the episode of its first task.

    Raises:
        ConfigError: there is none, or it refuses its settings.
        NotTried: no server has answered within this time, or it failed otherwise.
    """
    if worlds is None:
        raise NotTried("no environment server is known")
    record = EnvironmentSource(source)[0]
    task = Task(
        job_id=spec.name, lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source=record.data_source,
        ground_truth="", extra_info=record.extra_info, group_size=1, temperature=1.0, max_tokens=1, min_policy_version=0,
        timeout_s=seconds, environment=environment_call(record, spec.environment),
    )  # fmt: skip
    try:
        async with asyncio.timeout(seconds), worlds.episode(task) as world:
            return await world.reset()
    except TimeoutError as error:
        raise NotTried(f"environment {source.environment} has not begun within {seconds:.0f} s") from error
    except EnvironmentFailed as failure:
        if failure.permanent:
            raise ConfigError(str(failure), field=f"data.{section}.source") from failure
        raise NotTried(str(failure)) from failure
