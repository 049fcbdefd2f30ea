"""Environments as sources: a task is an episode's seed; its prompt is what the environment says first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.data.procedural import DEFAULT_SIZE, ProceduralSource
from services.common.data.record import TaskRecord
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec
from services.common.spec.environment import EnvironmentSpec
from services.common.streams.types import EnvironmentCall

ENVIRONMENT = "environment"
"""Key of `extra_info`: the environment's name, config and seed. Rows of a file may have it, too."""


class _Played(BaseModel):
    """What `extra_info` says of an environment."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(min_length=1, max_length=256)]
    config: dict[str, Any] = {}
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0


def environment_call(record: TaskRecord, limits: EnvironmentSpec | None) -> EnvironmentCall | None:
    """The environment that a task's rollouts are played in, within the job's limits; None where the row names none.

    Raises:
        DataError: the row names one wrongly, or the job has no section `environment`.
    """
    if record.extra_info.get(ENVIRONMENT) is None:
        return None
    where = f"a row of {record.data_source}: extra_info.{ENVIRONMENT}"
    if limits is None:
        raise DataError(f"{where} names one, and the job has no section environment", field=ENVIRONMENT)
    try:
        played = _Played.model_validate(record.extra_info[ENVIRONMENT])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise DataError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return EnvironmentCall(played.name, played.config, played.seed, **limits.model_dump())


class EnvironmentSource:
    """The episodes of one `environment:<name>` source. Whether there is such an environment, the servers that play it know."""

    def __init__(self, spec: DataSourceSpec) -> None:
        self._spec, self._size = spec, spec.size or DEFAULT_SIZE
        self._first_seed = ProceduralSource.first_seed(spec.seed, self._size)
        self.fingerprint = hashlib.blake2b(spec.model_dump_json().encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> TaskRecord:
        if not 0 <= index < self._size:
            raise IndexError(f"task {index} of a source of {self._size}")
        spec = self._spec
        played = {"name": spec.environment, "config": spec.config, "seed": self._first_seed + index}
        return TaskRecord((), spec.data_source or spec.source, "", {"index": index, ENVIRONMENT: played})

    def expect(self, indices: Sequence[int]) -> None:
        """Does nothing: a task costs nothing."""
