"""Checks of a body, and of a new job's model and data: run in a child that may be killed at any moment.

Whatever a job names is opened here for the first time, by the parts that the learner uses itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from services.common.errors import ConfigError
from services.common.settings import Settings
from services.common.spec import DataSourceSpec, JobSpec
from services.gateway.errors import MAX_PROBLEMS, SpecRefused
from services.gateway.spec_body import parse_body

MARGIN_S = 1.0
"""What remains of the time when a reader of a large file stops looking for more."""
MAX_DATA_SOURCES = 100
"""Most names of data sources that are looked up for one file."""


def prepare() -> None:
    """Imports what the checks need, for the forkserver."""
    import pyarrow.parquet  # noqa: F401

    from services.common.data import files, procedural  # noqa: F401

    with contextlib.suppress(ImportError):
        import reasoning_gym  # noqa: F401


def read_body(body: bytes, media_type: str) -> dict[str, Any]:
    """The spec in a request's body as JSON, under `spec`; or under `problems` each wrong field and what is wrong with it."""
    try:
        return {"spec": parse_body(body, media_type).model_dump_json(), "problems": []}
    except SpecRefused as error:
        return {"problems": [[problem.field, problem.message] for problem in error.problems[:MAX_PROBLEMS]]}


class JobChecks:
    """The checks of one spec. Each raises ConfigError with `field: message` lines."""

    def __init__(self, spec: str, settings: dict[str, Any]) -> None:
        """Opens nothing yet.

        Args:
            spec: as JSON.
            settings: `Settings.public` of the gateway.
        """
        self._spec = JobSpec.model_validate_json(spec)
        self._settings = Settings(**settings)

    def model(self) -> None:
        """The model is there, whole, safe, and fits the parallel sizes."""
        from services.common.models import check_parallel_sizes, inspect_model, resolve_model

        with _readable("model.path"):
            check_parallel_sizes(inspect_model(resolve_model(self._spec.model.path, self._settings)), self._spec)

    def data(self, section: str, seconds: float) -> list[str]:
        """The source of `data.<section>` opens; the `data_source`s that its tasks name, as many as are found in so many seconds."""
        from services.common.data import open_source

        until = time.monotonic() + seconds - MARGIN_S
        source: DataSourceSpec = getattr(self._spec.data, section)
        with _readable(f"data.{section}.source"):
            tasks = open_source(source, self._settings, field=f"data.{section}")
            if source.procedural_task is not None or source.data_source is not None:
                return [tasks[0].data_source]
            found = set()
            for index in range(len(tasks)):
                found.add(tasks[index].data_source)
                if time.monotonic() > until or len(found) == MAX_DATA_SOURCES:
                    break
            return sorted(found)


@contextlib.contextmanager
def _readable(field: str) -> Iterator[None]:
    """A file that cannot be read is the field's fault."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{field}: cannot be read: {error.strerror or error}") from error
