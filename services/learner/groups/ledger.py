"""The ledger: every group that the job issues ends with exactly one fate, and the fates sum to the groups issued."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.jobs.fates import Fate

MOST_REASONS = 1000
"""Reasons of failures that are counted apart; further ones are counted together."""
REASON_CHARS = 300
"""What is kept of each for counting; the journal has it whole."""
OTHER_REASONS = "other reasons"
TOLD_REASONS = 10
"""Reasons that the job's record names, the most frequent."""


@dataclass(frozen=True, slots=True)
class Settled:
    """One group's end, as the journal keeps it."""

    group_id: int
    fate: Fate
    reason: str = ""


@dataclass(slots=True)
class ActiveGroup:
    """A group that was issued and has no fate yet."""

    group_id: int
    issue_version: int
    """The learner's policy version when it was issued: no token of it is older."""
    attempt: int = 1
    issued_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    """Judged, informative, and waiting for a step."""
    failure: str = ""
    """Why this attempt failed; empty while it may still succeed."""


class Ledger:
    """Fates by ordinal. Ordinals below `frontier` all have one; `active` holds the others that were issued."""

    def __init__(self) -> None:
        """Nothing issued yet."""
        self.issued = 0
        self.frontier = 0
        self.counts: Counter[Fate] = Counter()
        self.failed_reasons: Counter[str] = Counter()
        """Failed groups by reason, since this process began unless others are added."""
        self.newest_failure = ""
        """Why the newest failed group failed."""
        self.active: dict[int, ActiveGroup] = {}
        self._beyond: set[int] = set()
        self._unwritten: list[Settled] = []

    def issue(self, policy_version: int) -> ActiveGroup:
        """The next ordinal, active from now on."""
        group = ActiveGroup(self.issued, policy_version)
        self.active[self.issued] = group
        self.issued += 1
        return group

    def settle(self, group_id: int, fate: Fate, reason: str = "") -> bool:
        """Gives an active group its fate; False when it has one already, or was never issued."""
        if self.active.pop(group_id, None) is None:
            return False
        self._record(Settled(group_id, fate, reason))
        return True

    def take_unwritten(self) -> list[Settled]:
        """Fates decided since the last call: what the next journal record carries."""
        settled, self._unwritten = self._unwritten, []
        return settled

    def replay(self, issued: int, settled: list[Settled]) -> None:
        """Applies a journal record: its fates, and the ordinals issued by then. Once more, or after a newer `restore`, changes nothing."""
        self.reissue(issued, policy_version=0)
        for item in settled:
            self.settle(item.group_id, item.fate, item.reason)
        written = {item.group_id for item in settled}
        self._unwritten = [item for item in self._unwritten if item.group_id not in written]

    def reissue(self, issued: int, policy_version: int) -> None:
        """Makes ordinals up to `issued` (not included) active, without a fate of their own yet."""
        while self.issued < issued:
            self.issue(policy_version)

    def summary(self) -> dict[str, int]:
        """Groups issued, active, and by fate."""
        return {"issued": self.issued, "active": len(self.active), **{fate.value: self.counts[fate] for fate in Fate}}

    def accounts(self) -> dict[str, str]:
        """The fields of the job's record that people read of its groups, as `JobStore.update` takes them."""
        reasons = dict(self.failed_reasons.most_common(TOLD_REASONS))
        return {
            "groups": json.dumps(self.summary()),
            "failure": self.newest_failure,
            "failed_reasons": json.dumps(reasons),
        }

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` makes the same ledger."""
        return {
            "issued": self.issued,
            "frontier": self.frontier,
            "beyond": sorted(self._beyond),
            "counts": dict(self.counts),
            "unwritten": [[item.group_id, item.fate, item.reason] for item in self._unwritten],
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Ledger:
        """The ledger that `state` describes; groups without a fate are active again, and fates that no record has wait for the next."""
        ledger = cls()
        ledger.issued, ledger.frontier = int(state["issued"]), int(state["frontier"])
        ledger._beyond = set(state["beyond"])
        ledger.counts = Counter({Fate(name): int(count) for name, count in state["counts"].items()})
        ledger._unwritten = [Settled(int(gid), Fate(fate), str(reason)) for gid, fate, reason in state["unwritten"]]
        without = (i for i in range(ledger.frontier, ledger.issued) if i not in ledger._beyond)
        ledger.active = {group_id: ActiveGroup(group_id, issue_version=0) for group_id in without}
        return ledger

    def count_failures(self, reasons: Mapping[str, int]) -> None:
        """Adds failures to those by reason: of groups that another process settled."""
        for reason, count in reasons.items():
            known = reason[:REASON_CHARS]
            if known not in self.failed_reasons and len(self.failed_reasons) >= MOST_REASONS:
                known = OTHER_REASONS
            self.failed_reasons[known] += count

    def unwritten_failures(self) -> Counter[str]:
        """Failures by reason that no journal record has yet."""
        return Counter(item.reason for item in self._unwritten if item.fate is Fate.FAILED)

    def _record(self, item: Settled) -> None:
        self.counts[item.fate] += 1
        if item.fate is Fate.FAILED:
            self.count_failures({item.reason: 1})
            self.newest_failure = item.reason[:REASON_CHARS]
        self._unwritten.append(item)
        self._beyond.add(item.group_id)
        while self.frontier in self._beyond:
            self._beyond.remove(self.frontier)
            self.frontier += 1
