"""Sources that a job spec names as `data.train` or `data.eval`, opened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.common.config.hub_folder import relative_path
from services.common.config.paths import locate
from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.data.environments import EnvironmentSource
from services.common.data.files import FileSource
from services.common.data.procedural import ProceduralSource
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec
from services.common.spec.reference import is_reference, parse_reference


def open_source(
    spec: DataSourceSpec, settings: Settings, *, field: str = "data.train", until: float | None = None
) -> FileSource | ProceduralSource | EnvironmentSource:
    """The source; a file's rows are checked until `until` (None: all), of a procedural one the first task. Raises as `open_within`."""
    return open_within(spec, data_roots(settings), DataBounds.of(settings), field=field, until=until)


def open_within(
    spec: DataSourceSpec,
    roots: Sequence[Path],
    bounds: DataBounds,
    *,
    field: str,
    until: float | None = None,
    whole: bool = True,
) -> FileSource | ProceduralSource | EnvironmentSource:
    """The source; a file's rows are checked until `until`, monotonic seconds (None: all), and its bytes read to the end if `whole`.

    Raises:
        DataError: names the `field` of the job spec, the file and, if known, the row.
    """
    if spec.procedural_task is not None:
        return ProceduralSource(spec, field=field, bounds=bounds)
    if spec.environment is not None:
        return EnvironmentSource(spec)
    if spec.config:
        raise DataError(f"is for procedural sources; {spec.source} is a file", field=f"{field}.config")
    name = spec.source
    if is_reference(name):
        name = str(relative_path(parse_reference(name, file=True)))
    path = locate(name, roots, field=f"{field}.source", error=DataError)
    if name != spec.source and not path.is_file():
        message = f"{spec.source} is not there: fetch it with `millrace data pull {spec.source}`"
        raise DataError(message, field=f"{field}.source")
    if not path.is_file():
        listed = ", ".join(str(root) for root in roots)
        raise DataError(f"{path} is not there (relative paths are looked for in {listed})", field=f"{field}.source")
    return FileSource(path, spec, field=f"{field}.source", bounds=bounds, until=until, whole=whole)


def data_roots(settings: Settings) -> list[Path]:
    """The directories that files may lie in."""
    return [settings.home / "data", *settings.data_roots, settings.hub_folder.roots[1]]
