"""Opens what a job spec names as `data.train` or `data.eval`."""

from __future__ import annotations

from pathlib import Path

from services.common.data.record import TaskSource
from services.common.errors import DataError
from services.common.paths import locate
from services.common.settings import Settings
from services.common.spec import DataSourceSpec


def open_source(spec: DataSourceSpec, settings: Settings, *, field: str = "data.train") -> TaskSource:
    """The source, wholly checked: every row of a file, the first task of a procedural one.

    Args:
        spec: what to open.
        settings: has the directories that files may lie in.
        field: where the spec stands in the job's, for the errors.

    Raises:
        DataError: names the field, the file and, where there is one, the row.
    """
    if spec.procedural_task is not None:
        from services.common.data.procedural import ProceduralSource

        return ProceduralSource(spec, field=field)
    from services.common.data.files import FileSource

    if spec.config:
        raise DataError(f"{field}.config: is for procedural sources; {spec.source} is a file")
    return FileSource(_find(spec.source, settings, f"{field}.source"), spec, field=f"{field}.source")


def _find(source: str, settings: Settings, field: str) -> Path:
    roots = [settings.home / "data", *settings.data_roots]
    path = locate(source, roots, field=field, error=DataError)
    if not path.is_file():
        listed = ", ".join(str(root) for root in roots)
        raise DataError(f"{field}: {path} is not there (relative paths are looked for in {listed})")
    return path
