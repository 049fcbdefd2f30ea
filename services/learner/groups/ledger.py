"""Ledger of groups: each group that the job issues ends with exactly one fate, and the fates sum to the groups issued."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.jobs.fates import Fate

MAX_REASONS = 1000
"""Failure reasons that are counted separately; all others are counted together."""
REASON_CHARS = 300
"""Length to which a reason is cut for counting; the journal keeps all of it."""
OTHER_REASONS = "other reasons"
REPORTED_REASONS = 10
"""Reasons in the job's record, the most frequent ones."""


@dataclass(frozen=True, slots=True)
class Settled:
    """One group's fate, as the journal keeps it."""

    group_id: int
    fate: Fate
    reason: str = ""


@dataclass(slots=True)
class ActiveGroup:
    """A group that was issued and has no fate yet."""

    group_id: int
    issue_version: int
    """The learner's policy version when it was issued: none of its tokens is older."""
    attempt: int = 1
    issued_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    """Judged, informative, waiting for a step."""
    failure: str = ""
    """Why this attempt failed; empty while it may still succeed."""


class Ledger:
    """Fates by ordinal. All ordinals below `frontier` have one; `active` holds the issued ones without."""

    def __init__(self) -> None:
        self.issued = 0
        self.frontier = 0
        self.counts: Counter[Fate] = Counter()
        self.failed_reasons: Counter[str] = Counter()
        """Failed groups by reason, since this process began, plus those of `count_failures`."""
        self.newest_failure = ""
        """Reason of the newest failed group."""
        self.active: dict[int, ActiveGroup] = {}
        self._beyond: set[int] = set()
        self._unwritten: list[Settled] = []

    def issue(self, policy_version: int) -> ActiveGroup:
        """Issues the next ordinal, which is active from now on."""
        group = ActiveGroup(self.issued, policy_version)
        self.active[self.issued] = group
        self.issued += 1
        return group

    def settle(self, group_id: int, fate: Fate, reason: str = "") -> bool:
        """Gives an active group its fate; False when it has one already, or was never issued."""
        if self.active.pop(group_id, None) is None:
            return False
        self.counts[fate] += 1
        if fate is Fate.FAILED:
            self.count_failures({reason: 1})
            self.newest_failure = reason[:REASON_CHARS]
        self._unwritten.append(Settled(group_id, fate, reason))
        self._beyond.add(group_id)
        while self.frontier in self._beyond:
            self._beyond.remove(self.frontier)
            self.frontier += 1
        return True

    def take_unwritten(self) -> list[Settled]:
        """Fates decided since the last call, for the next journal record."""
        settled, self._unwritten = self._unwritten, []
        return settled

    def replay(self, issued: int, settled: list[Settled]) -> None:
        """Applies a journal record: its fates, and the ordinals issued by then. Idempotent, also after a newer `restore`."""
        self.reissue(issued, policy_version=0)
        for item in settled:
            self.settle(item.group_id, item.fate, item.reason)
        written = {item.group_id for item in settled}
        self._unwritten = [item for item in self._unwritten if item.group_id not in written]

    def reissue(self, issued: int, policy_version: int) -> None:
        """Issues ordinals up to `issued` (not included) that were not issued yet."""
        while self.issued < issued:
            self.issue(policy_version)

    def summary(self) -> dict[str, int]:
        """Number of groups issued, active, and by fate."""
        return {"issued": self.issued, "active": len(self.active), **{fate.value: self.counts[fate] for fate in Fate}}

    def accounts(self) -> dict[str, str]:
        """Fields of the job's record about its groups, as `JobStore.update` takes them."""
        reasons = json.dumps(dict(self.failed_reasons.most_common(REPORTED_REASONS)))
        return {"groups": json.dumps(self.summary()), "failure": self.newest_failure, "failed_reasons": reasons}

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` builds the same ledger."""
        return {
            "issued": self.issued,
            "frontier": self.frontier,
            "beyond": sorted(self._beyond),
            "counts": dict(self.counts),
            "unwritten": [[item.group_id, item.fate, item.reason] for item in self._unwritten],
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Ledger:
        """The ledger of a `state`: groups without a fate are active, and fates in no journal record wait for the next one."""
        ledger = cls()
        ledger.issued, ledger.frontier = int(state["issued"]), int(state["frontier"])
        ledger._beyond = set(state["beyond"])
        ledger.counts = Counter({Fate(name): int(count) for name, count in state["counts"].items()})
        ledger._unwritten = [Settled(int(gid), Fate(fate), str(reason)) for gid, fate, reason in state["unwritten"]]
        without = (i for i in range(ledger.frontier, ledger.issued) if i not in ledger._beyond)
        ledger.active = {group_id: ActiveGroup(group_id, issue_version=0) for group_id in without}
        return ledger

    def count_failures(self, reasons: Mapping[str, int]) -> None:
        """Adds failures by reason, also those of groups that another process settled."""
        for reason, count in reasons.items():
            known = reason[:REASON_CHARS]
            if known not in self.failed_reasons and len(self.failed_reasons) >= MAX_REASONS:
                known = OTHER_REASONS
            self.failed_reasons[known] += count

    def unwritten_failures(self) -> Counter[str]:
        """Failures by reason that are in no journal record yet."""
        return Counter(item.reason for item in self._unwritten if item.fate is Fate.FAILED)
