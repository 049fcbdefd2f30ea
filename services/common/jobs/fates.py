"""Fates: the end of every group, and their list for people in the job's folder: `<home>/jobs/<job>/fates.jsonl`.

The file has a line for each journal record. The learner writes it after the journal, and can rebuild it from the journal at any time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

FATES_FILE = "fates.jsonl"


class Fate(StrEnum):
    """How a group ended."""

    TRAINED = "trained"
    DEGENERATE = "degenerate"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FateLine:
    """The fates in one journal record.

    Example line: {"step": 7, "lineage": 1, "issued": 64, "fates": [["trained", "", [40, 41]], ["failed", "a reward is not finite", [43]]]}
    """

    step: int
    lineage: int
    issued: int
    """Groups issued until then."""
    fates: tuple[tuple[Fate, str, tuple[int, ...]], ...]
    """Fate, reason, group ids."""

    def dump(self) -> str:
        """The line, with its newline."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    @classmethod
    def parse(cls, text: str) -> FateLine:
        """The fates in a line that `dump` made. Raises ValueError, KeyError or TypeError when the text is no such line."""
        document = json.loads(text)
        fates = tuple((Fate(fate), str(reason), tuple(ids)) for fate, reason, ids in document["fates"])
        return cls(int(document["step"]), int(document["lineage"]), int(document["issued"]), fates)


@dataclass(frozen=True, slots=True)
class GroupFate:
    """The end of one group."""

    group_id: int
    fate: Fate
    step: int
    """The step that trained it, or the step whose journal record contains its end."""
    lineage: int
    reason: str


@dataclass(slots=True)
class FateList:
    """Sums over a job's groups, and one page of them."""

    step: int = 0
    lineage: int = 0
    issued: int = 0
    fates: Counter[Fate] = field(default_factory=Counter)
    failed_reasons: Counter[str] = field(default_factory=Counter)
    page: list[GroupFate] = field(default_factory=list)

    @property
    def active(self) -> int:
        """Groups issued and without a fate."""
        return self.issued - self.fates.total()


def read_lines(path: Path) -> Iterator[FateLine]:
    """The lines of the file, without an incomplete last line. Raises OSError, and as `FateLine.parse`."""
    with path.open(encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):
                yield FateLine.parse(text)


def read_fates(path: Path, *, fate: Fate | None, offset: int, limit: int) -> FateList:
    """Sums over all groups, and the page of those with this fate (None: any) as they ended. Raises as `read_lines`."""
    found = FateList()
    end, position = offset + limit, 0
    for line in read_lines(path):
        found.step, found.lineage, found.issued = line.step, line.lineage, max(found.issued, line.issued)
        for kind, reason, ids in line.fates:
            found.fates[kind] += len(ids)
            if kind is Fate.FAILED:
                found.failed_reasons[reason] += len(ids)
            if fate in {None, kind}:
                on_page = ids[max(0, offset - position) : max(0, end - position)]
                found.page += [GroupFate(group_id, kind, line.step, line.lineage, reason) for group_id in on_page]
                position += len(ids)
    return found


def collect(fates: Iterable[tuple[int, Fate, str]]) -> tuple[tuple[Fate, str, tuple[int, ...]], ...]:
    """Group ids by fate and reason, in the order of the first group of each."""
    found: dict[tuple[Fate, str], list[int]] = {}
    for group_id, fate, reason in fates:
        found.setdefault((fate, reason), []).append(group_id)
    return tuple((fate, reason, tuple(ids)) for (fate, reason), ids in found.items())
