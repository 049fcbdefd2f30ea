"""Sources that a job spec names as `data.train` or `data.eval`, opened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.common.config.paths import locate
from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.data.files import FileSource
from services.common.data.procedural import ProceduralSource
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec


def open_source(
    spec: DataSourceSpec, settings: Settings, *, field: str = "data.train", until: float | None = None
) -> FileSource | ProceduralSource:
    """The source, fully checked: every row of a file, the first task of a procedural one.

    Rows are checked until `until`, monotonic seconds; None checks all. `field` of the job spec is for the errors.

    Raises:
        DataError: names the field, the file and, if known, the row.
    """
    return open_within(spec, data_roots(settings), DataBounds.of(settings), field=field, until=until)


def open_within(
    spec: DataSourceSpec, roots: Sequence[Path], bounds: DataBounds, *, field: str, until: float | None = None
) -> FileSource | ProceduralSource:
    """`open_source` with directories and bounds instead of settings."""
    if spec.procedural_task is not None:
        return ProceduralSource(spec, field=field, bounds=bounds)
    if spec.config:
        raise DataError(f"is for procedural sources; {spec.source} is a file", field=f"{field}.config")
    path = locate(spec.source, roots, field=f"{field}.source", error=DataError)
    if not path.is_file():
        listed = ", ".join(str(root) for root in roots)
        message = f"{path} is not there (relative paths are looked for in {listed})"
        raise DataError(message, field=f"{field}.source")
    return FileSource(path, spec, field=f"{field}.source", bounds=bounds, until=until)


def data_roots(settings: Settings) -> list[Path]:
    """The directories that files may lie in."""
    return [settings.home / "data", *settings.data_roots]
