"""ModelScope, by `modelscope_hub`. Its address is MODELSCOPE_ENDPOINT or MODELSCOPE_DOMAIN, its token MODELSCOPE_API_TOKEN.

Its listings name no commit of their own, but the commit of each file. A repository's commit is the newest of them at which the hub lists
the same contents; a data file's is its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import HubError, HubRefused, MillraceError
from services.common.hubs.repository import HubFile, Repository, brief, is_of_disk
from services.common.spec.reference import Reference

DEFAULT_REVISION = "master"
MAX_COMMITS = 3
"""Commits that are tried, the newest first: one that changed several files has the same date in all of them."""


class ModelScope:
    """ModelScope's hub."""

    def __init__(self) -> None:
        """Imports the library. Raises HubRefused where it is not installed."""
        warnings.simplefilter("ignore", FutureWarning)  # MODELSCOPE_DOMAIN has a newer name
        try:
            from modelscope_hub import HubApi
        except ImportError as error:
            raise HubRefused("this needs ModelScope's library: pip install 'millrace[hubs]'") from error
        self._api = HubApi()
        self.endpoint = str(self._api.legacy.endpoint)

    def look_up(self, reference: Reference) -> Repository:
        """As `Hub.look_up`."""
        entries = self._entries(reference.at(reference.revision or DEFAULT_REVISION))
        wanted = [entry for entry in entries if reference.file in {"", entry.get("Path")}]
        if reference.resolved or not wanted:
            return Repository(reference, tuple(map(_file, entries)))
        for commit in _commits(wanted)[:MAX_COMMITS]:
            found = self._entries(reference.at(commit))
            same = [entry for entry in found if reference.file in {"", entry.get("Path")}]
            if set(map(_file, same)) == set(map(_file, wanted)):
                return Repository(reference.at(commit), tuple(map(_file, found)))
        raise HubRefused(
            f"{self.endpoint} names no commit of revision {reference.revision or DEFAULT_REVISION!r}: give one, @COMMIT"
        )

    def download(self, reference: Reference, file: HubFile, part: Path) -> None:
        """As `Hub.download`: the library keeps the beginning of a file beside it, and goes on from there."""
        with self._errors(reference):
            self._api.downloader.download_file(
                reference.repo,
                _repo_type(reference),
                file.path,
                revision=reference.revision,
                cache_dir=part.parent,
                local_dir=part.parent / "modelscope",
                expected_sha256=file.sha256 or None,
                file_size=file.size,
            )
        (part.parent / "modelscope" / file.path).rename(part)

    def _entries(self, reference: Reference) -> list[dict[str, Any]]:
        """The files in the repository's main directory, or in that of the data file."""
        parent = str(Path(reference.file).parent) if reference.file else "."
        with self._errors(reference):
            found = self._api.legacy.list_repo_files(
                reference.repo,
                _repo_type(reference),
                revision=reference.revision,
                recursive=False,
                root=None if parent == "." else parent,
            )
        return [entry for entry in found if entry.get("Type") != "tree"]

    @contextmanager
    def _errors(self, reference: Reference) -> Iterator[None]:
        from modelscope_hub import errors

        kind = "dataset" if reference.file else "model"
        try:
            yield
        except MillraceError:
            raise
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            message = f"{self.endpoint} refuses access: set MODELSCOPE_API_TOKEN to a token that has it"
            raise HubRefused(message) from error
        except errors.NotExistError as error:
            message = f"there is no such {kind} on {self.endpoint}, or it has no revision {reference.revision!r}"
            raise HubRefused(message) from error
        except errors.HubError as error:
            if error.retryable:
                raise HubError(f"{self.endpoint}: {brief(error)}") from error
            raise HubRefused(f"{self.endpoint} refuses it: {brief(error)}") from error
        except OSError as error:
            if is_of_disk(error):
                raise
            raise HubError(f"{self.endpoint}: {brief(error)}") from error
        except Exception as error:
            raise HubError(f"{self.endpoint} does not answer: {type(error).__name__}: {brief(error)}") from error


def _commits(entries: list[dict[str, Any]]) -> list[str]:
    """The commits of these files, the newest first."""
    newest_first = sorted(entries, key=lambda entry: entry.get("CommittedDate") or 0, reverse=True)
    return list(dict.fromkeys(str(entry["Revision"]) for entry in newest_first if entry.get("Revision")))


def _repo_type(reference: Reference) -> str:
    return "dataset" if reference.file else "model"


def _file(entry: Mapping[str, Any]) -> HubFile:
    return HubFile(str(entry.get("Path") or ""), int(entry.get("Size") or 0), sha256=str(entry.get("Sha256") or ""))
