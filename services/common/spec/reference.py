"""Reference to a model or a data file of a hub: `hf:ORG/NAME[@REVISION][/FILE]`, or `modelscope:…`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import quote, unquote

HUBS = ("hf", "modelscope")
FORM = "hf:ORG/NAME[@REVISION] or modelscope:ORG/NAME[@REVISION]"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_SPECIAL = r"refs/(?:convert/\w+|pr/\d+)"
"""Revisions of Hugging Face with slashes that are written as they are."""
_REFERENCE = re.compile(
    rf"(?P<hub>{'|'.join(HUBS)}):(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>{_SPECIAL}|[^/@\s]+))?(?:/(?P<file>[^\s\\]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[\w.~^+/-]{1,200}")
_SHORT = {"~parquet": "refs/convert/parquet"}
"""Short names of revisions, as Hugging Face writes them."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model, or one file of a dataset. Example: Reference("hf", "openai/gsm8k", "main", "socratic/test.parquet")."""

    hub: str
    repo: str
    """`ORG/NAME`."""
    revision: str = ""
    """Branch, tag or commit; empty: the hub's main branch."""
    file: str = ""
    """Path in the repository; empty for a model."""

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='~')}" if self.revision else ""
        return f"{self.hub}:{self.repo}{revision}{f'/{self.file}' if self.file else ''}"

    @property
    def resolved(self) -> bool:
        """Whether the revision is a commit, whose bytes never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> Self:
        """The same at this commit."""
        return replace(self, revision=commit)


def is_reference(text: str) -> bool:
    """Whether the text begins as a reference does."""
    return text.startswith(tuple(f"{hub}:" for hub in HUBS))


def parse_reference(text: str, *, file: bool | None = None) -> Reference:
    """The reference in a text; `file`: whether it must name a file of the repository, or must not (None: either).

    Raises:
        ValueError: it has another form.
    """
    form = f"{FORM}, then /PATH of a file" if file else FORM
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in match["repo"]:
        raise ValueError(f"{text[:200]!r} is no reference to a hub: write {form}")
    path = match["file"] or ""
    if file is not None and bool(path) is not file:
        raise ValueError(f"{text[:200]!r} names {'no file' if file else 'a file'}: write {form}")
    if any(part in {"", ".", ".."} for part in path.split("/")) and path:
        raise ValueError(f"{path[:200]!r} is no path in a repository")
    revision = unquote(match["revision"] or "")
    revision = _SHORT.get(revision, revision)
    if revision and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ValueError(f"{revision[:200]!r} is no revision")
    return Reference(match["hub"], match["repo"], revision, path)


def check_model_path(value: str) -> str:
    """The value of a field that names a model. Raises ValueError when it is a reference of another form."""
    if is_reference(value):
        parse_reference(value, file=False)
    return value
