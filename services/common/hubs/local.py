"""Local directory as a source of a model: what a job needs of it is copied to the registered models, and nothing that can run."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from services.common.durable import fsync_directory
from services.common.errors import HubRefused, ModelError
from services.common.hubs.choice import model_files
from services.common.hubs.repository import HubFile
from services.common.models.directory import FIELD, check_chat_template, inspect_model

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def register(source: Path, name: str, models_dir: Path) -> str:
    """Copies a model to `models_dir`/`name`; what a job that names it must still be told, or nothing.

    Raises:
        ModelError: it is no model that can be trained here, there is one of this name, or it cannot be read or written.
    """
    if not _NAME.fullmatch(name):
        raise ModelError(f"{name!r} cannot be a model's name: letters, digits, `.`, `_` and `-`", field="--name")
    target = models_dir / name
    if target.exists():
        raise ModelError(f"there is a model {name!r} already ({target}): give another --name", field="--name")
    try:
        files = [HubFile(path.name, path.stat().st_size) for path in sorted(source.iterdir()) if path.is_file()]
        wanted = model_files(files)
        models_dir.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=models_dir))
        try:
            _fill(fresh, source, wanted)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        fsync_directory(models_dir)
    except HubRefused as error:
        raise ModelError(f"{source} {error}") from error
    except OSError as error:
        raise ModelError(f"{source} cannot be copied to {target}: {error}") from error
    return _lacking(target)


def _fill(folder: Path, source: Path, files: list[HubFile]) -> None:
    """Copies the files, small ones first, so that a model that cannot be trained is refused before its weights are copied."""
    folder.chmod(0o755)  # mkdtemp makes it private; a server of another user reads models too
    for file in sorted(files, key=lambda file: (file.size, file.path)):
        shutil.copyfile(source / file.path, folder / file.path)
    try:
        inspect_model(folder)
    except ModelError as error:
        message = str(error).removeprefix(f"{FIELD}: ").replace(str(folder), str(source))
        raise ModelError(message) from error


def _lacking(folder: Path) -> str:
    try:
        check_chat_template(folder)
    except ModelError:
        return "it has no chat template: give one in the job, as `model.chat_template`"
    return ""
