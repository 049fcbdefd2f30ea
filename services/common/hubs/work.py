"""Work of the child: surveys a reference (commit, files, sizes, refusals) and fetches its files. Network and hubs' libraries are here only.

survey ──► plan.json, configs ──► fetch: each file ─► part ─► compared with the hub's digest ─► files/ ──► moved to its place, whole
           refused: nothing left                │ killed, broken off: parts stay, the next fetch goes on from there
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from services.common.config.hub_folder import FILES, LOCK, PLAN, HubFolder
from services.common.durable import write_durably
from services.common.errors import HubError, HubRefused, ModelError
from services.common.hubs.choice import choose, require_size, show_bytes, surveyed
from services.common.hubs.repository import Hub, HubFile, beat_of, brief, is_of_disk, require_content
from services.common.models.directory import inspect_config
from services.common.spec.reference import Reference, parse_reference

PARALLEL_FILES = 4
PARTS = "parts"
SPARE_BYTES = 256 * 1024**2
"""Space that a fetch leaves on the disk."""


class Plan(TypedDict):
    """What is to be fetched, as JSON values."""

    reference: str
    """Resolved."""
    bytes: int
    files: list[dict[str, Any]]
    """Fields of HubFile."""


def prepare() -> None:
    """Imports the hubs' libraries in the forkserver."""
    for name in ("hf", "modelscope"):
        with contextlib.suppress(HubRefused, ImportError):
            open_hub(name)


def open_hub(name: str) -> Hub:
    """The hub of this name."""
    from services.common.hubs.hugging_face import HuggingFace
    from services.common.hubs.model_scope import ModelScope

    return HuggingFace() if name == "hf" else ModelScope()


def survey(text: str, root: str, max_bytes: int) -> Plan:
    """The plan of a reference's fetch; it is kept, with the model's configs, for the fetch.

    Raises:
        HubRefused: it does not exist, is not accessible, may not be used, is too large, or the disk has no room.
        HubError: the hub does not answer.
    """
    reference, folder = _parse(text), HubFolder(Path(root))
    with _disk():
        plan = _looked_up(reference, folder, max_bytes)
        resolved = parse_reference(plan["reference"])
        if not folder.is_complete(resolved):
            partial = folder.partial(resolved)
            partial.mkdir(parents=True, exist_ok=True)
            with _locked(partial / LOCK, wait=True):
                _keep(plan, folder)
    return plan


def fetch(text: str, root: str, max_bytes: int) -> None:
    """Fetches a resolved reference to its place; nothing to do where it is there. Raises as `survey`."""
    reference, folder = _parse(text), HubFolder(Path(root))
    partial = folder.partial(reference)
    with _disk():
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial / LOCK):
            if folder.is_complete(reference):
                folder.discard(reference)
                return
            plan = _looked_up(reference, folder, max_bytes)
            _keep(plan, folder)
            files = [HubFile(**file) for file in plan["files"]]
            require_size(reference, plan["bytes"], max_bytes)
            _require_room(partial, files)
            _download(open_hub(reference.hub), reference, files, partial)
            _inspect(reference, partial / FILES)
            folder.finish(reference)


def _looked_up(reference: Reference, folder: HubFolder, max_bytes: int) -> Plan:
    """The plan that is kept of a resolved reference, else what the hub says of it."""
    if reference.resolved and (known := read_plan(folder.partial(reference))):
        return known
    repository = open_hub(reference.hub).look_up(reference)
    files = choose(repository, max_bytes)
    size = sum(file.size for file in files)
    return Plan(reference=str(repository.reference), bytes=size, files=[asdict(file) for file in files])


def _keep(plan: Plan, folder: HubFolder) -> None:
    """Keeps a plan for its fetch, with the model's configs, once nothing in them speaks against it. The caller has the lock."""
    resolved = parse_reference(plan["reference"])
    partial, files = folder.partial(resolved), [HubFile(**file) for file in plan["files"]]
    if folder.is_complete(resolved) or read_plan(partial):
        return
    try:
        partial.mkdir(parents=True, exist_ok=True)  # another survey, which had the lock before, may have discarded it
        if not resolved.file:
            _download(open_hub(resolved.hub), resolved, surveyed(files), partial)
            _inspect(resolved, partial / FILES)
        _require_room(partial, files)
    except HubRefused:
        folder.discard(resolved)
        raise
    write_durably(partial / PLAN, json.dumps(plan).encode())


def _download(hub: Hub, reference: Reference, files: list[HubFile] | tuple[HubFile, ...], partial: Path) -> None:
    """Downloads the files that are not there yet, several at once; after an error no other is begun, and those under way end."""
    beat = beat_of(partial)
    missing = [file for file in files if not (partial / FILES / file.path).is_file()]
    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        try:
            begun = [threads.submit(_download_file, hub, reference, file, partial, beat) for file in missing]
            for done in as_completed(begun):
                done.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _download_file(hub: Hub, reference: Reference, file: HubFile, partial: Path, beat: Callable[[], None]) -> None:
    target, part = partial / FILES / file.path, partial / PARTS / file.path
    for path in (target, part):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not (part.is_file() and part.stat().st_size == file.size):
        hub.download(reference, file, part)
    require_content(part, file, beat)
    part.rename(target)


def _inspect(reference: Reference, folder: Path) -> None:
    """Refuses a model that needs code or has an architecture that is not trained here."""
    if reference.file:
        return
    try:
        inspect_config(folder)
    except ModelError as error:
        raise HubRefused(*(item.message.replace(f"{folder}/", "") for item in error.problems)) from error


def _require_room(partial: Path, files: list[HubFile] | tuple[HubFile, ...]) -> None:
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    needed, free = sum(file.size for file in files) - there, shutil.disk_usage(partial).free
    if needed + SPARE_BYTES > free:
        raise HubRefused(
            f"needs {show_bytes(needed)} more, and the disk of {partial.parent} has {show_bytes(free)} left"
        )


def read_plan(partial: Path) -> Plan | None:
    """The plan of a fetch; None before it was surveyed."""
    try:
        plan: Plan = json.loads((partial / PLAN).read_bytes())
    except FileNotFoundError:
        return None
    return plan


def _parse(text: str) -> Reference:
    try:
        return parse_reference(text)
    except ValueError as error:
        raise HubRefused(str(error)) from error


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds a lock that ends with the process. Raises HubError while another process has it, unless it is to `wait`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    except BlockingIOError as error:
        raise HubError("another process is fetching it") from error
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise HubRefused("the disk is full: what was fetched is kept") from error
        if is_of_disk(error):
            raise HubRefused(f"cannot be written: {brief(error)}") from error
        raise HubError(brief(error)) from error
