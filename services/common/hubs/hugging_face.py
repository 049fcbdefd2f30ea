"""Hugging Face Hub, by `huggingface_hub`. Its address is HF_ENDPOINT, its token HF_TOKEN (or that of `hf auth login`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import HubError, HubRefused, MillraceError
from services.common.hubs.repository import HubFile, Repository, brief, is_of_disk
from services.common.spec.reference import Reference

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

CHUNK_BYTES = 1024 * 1024
"""Bytes after which the library writes what it has; its own 10 MiB take minutes on a slow line, with no progress to be seen."""
TIMEOUT_S = 10.0
_TEMPORARY = frozenset({408, 425, 429})
"""Statuses below 500 after which another try may help."""


class HuggingFace:
    """The Hugging Face Hub."""

    def __init__(self) -> None:
        """Imports the library."""
        from huggingface_hub import HfApi, constants

        constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings contain signed addresses
        self._api = HfApi()
        self.endpoint = str(self._api.endpoint)

    def look_up(self, reference: Reference) -> Repository:
        """As `Hub.look_up`."""
        with self._errors(reference):
            info = self._api.repo_info(
                reference.repo,
                repo_type=_repo_type(reference),
                revision=reference.revision or None,
                timeout=TIMEOUT_S,
                files_metadata=not reference.file,
            )
            resolved = reference.at(str(info.sha))
            listed: list[Any] = list(getattr(info, "siblings", None) or [])
            if reference.file in {item.rfilename for item in listed}:
                listed = self._api.get_paths_info(
                    reference.repo, [reference.file], repo_type="dataset", revision=resolved.revision
                )
        return Repository(resolved, tuple(map(_file, listed)))

    def download(self, reference: Reference, file: HubFile, part: Path) -> None:
        """As `Hub.download`."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils._headers import build_hf_headers

        url = hf_hub_url(
            reference.repo,
            file.path,
            repo_type=_repo_type(reference),
            revision=reference.revision,
            endpoint=self.endpoint,
        )
        with self._errors(reference), part.open("ab") as opened:
            if opened.tell() > file.size:
                opened.seek(0)
                opened.truncate()
            # Not compressed: what a Range counts are then the file's own bytes.
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            http_get(url, opened, resume_size=opened.tell(), headers=headers, expected_size=file.size)

    @contextmanager
    def _errors(self, reference: Reference) -> Iterator[None]:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except MillraceError:
            raise
        except HfHubHTTPError as error:
            raise self._answer(error, reference) from error
        except json.JSONDecodeError as error:
            raise HubError(f"{self.endpoint} answers with something that is no JSON") from error
        except ValueError as error:  # one file beyond 50 GB, or a name that the library does not take
            raise HubRefused(brief(error)) from error
        except OSError as error:
            if is_of_disk(error):
                raise
            raise HubError(f"{self.endpoint}: {brief(error)}") from error
        except Exception as error:
            raise HubError(f"{self.endpoint} does not answer: {type(error).__name__}: {brief(error)}") from error

    def _answer(self, error: HfHubHTTPError, reference: Reference) -> MillraceError:
        """The meaning of an answer with an error."""
        from huggingface_hub import errors

        kind, status = _repo_type(reference), error.response.status_code
        if isinstance(error, errors.GatedRepoError):
            return HubRefused("is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account")
        if isinstance(error, errors.RepositoryNotFoundError):
            return HubRefused(f"there is no such {kind} on {self.endpoint}, or HF_TOKEN does not give access to it")
        if isinstance(error, errors.RevisionNotFoundError):
            return HubRefused(f"the {kind} has no revision {reference.revision!r}")
        if status in {401, 403}:
            return HubRefused(f"{self.endpoint} refuses access ({status}): HF_TOKEN is wrong, or gives none")
        if status < 500 and status not in _TEMPORARY:
            return HubRefused(f"{self.endpoint} refuses it: {brief(error)}")
        return HubError(f"{self.endpoint} answers {status}")


def _repo_type(reference: Reference) -> str:
    return "dataset" if reference.file else "model"


def _file(item: Any) -> HubFile:  # noqa: ANN401  RepoSibling or RepoFile
    path = str(getattr(item, "rfilename", None) or getattr(item, "path", ""))
    if item.lfs is not None:
        return HubFile(path, int(item.lfs.size), sha256=str(item.lfs.sha256))
    return HubFile(path, int(item.size or 0), blob=str(item.blob_id or ""))
