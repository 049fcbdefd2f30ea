"""Audit of a job's accounts: rebuilds every group's fate from the job's own files and checks the invariants.

journal ──► records, in order ──► fates, versions, ages ──┐
checkpoints ──► ledger states ────────────────────────────┼──► violations
step history, state (where they are known) ───────────────┘

It trusts no counter of a service, writes nothing, and does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import EntryError
from services.common.jobs.fates import Fate
from services.common.streams.codec import decode
from services.common.streams.types import Purpose, RolloutGroup, ScoredGroup
from services.learner.audit.report import AuditReport, Breach, Violation
from services.learner.storage.journal import BatchRecord
from services.learner.storage.lineage import Rise

State = Mapping[str, Any]
"""A checkpoint's state, as its manifest has it."""


@dataclass(slots=True)
class _Batch:
    lineage: int
    groups: int
    policy_age_max: int = 0
    ids: Counter[int] = field(default_factory=Counter)
    """Occurrences of each group in it."""


class Audit:
    """One job's audit: pass it everything in order, then call `finish`."""

    def __init__(
        self,
        job_id: str,
        max_off_policy_steps: int,
        checkpoints: Mapping[int, tuple[str, State]],
        start_step: int | None,
        limit_bytes: int,
    ) -> None:
        """Has seen nothing yet.

        `checkpoints`: step → (where, state), of all that verified; `start_step`: the job's first, None where it is not known;
        `limit_bytes`: of an entry (`limits.entry_limit`).
        """
        self.report = AuditReport(job_id, max_off_policy_steps=max_off_policy_steps, checkpoints=sorted(checkpoints))
        self.report.steps = start_step or 0
        self.rises: list[Rise] = []
        """Beginnings of the lineages, as the job's folder has them; empty where it cannot be read."""
        self._start, self._limit_bytes = start_step, limit_bytes
        self._checkpoints = dict(checkpoints)
        self._last_checkpoint: tuple[str, State] | None = None
        """The checkpoint of the newest step: all fates that it knows must be in the journal by the next step's record."""
        self._fates: dict[int, tuple[Fate, int]] = {}
        """group_id → fate and the step of its record."""
        self._trained: dict[int, _Batch] = {}
        self._missing: set[int] = set()
        """Steps whose records were removed where a lineage rose: their fates are in no record, only in a checkpoint."""
        self._blind = False
        """Whether the checkpoint that the job then continued from is gone: a later one has to serve."""
        self._given_up: set[int] = set()
        """Groups whose fate was in the missing records, according to a checkpoint."""
        self._digests: dict[int, str] = {}
        """Policy version → digest of its weights."""
        self._truncated = False
        self._record_digests: dict[int, str] = {}
        """Step → digest of the record that trains it."""

    def breach(self, breach: Breach, where: str, message: str) -> None:
        """Adds a violation."""
        self.report.violations.append(Violation(breach, where, message))

    @property
    def steps_journalled(self) -> list[int]:
        """The steps that the journal trains."""
        return sorted(self._trained)

    def record(self, where: str, record: BatchRecord) -> None:
        """Checks the next record of the journal; one without groups has fates only, and the last step's number."""
        report = self.report
        report.records += 1
        self._digests[record.base_version] = record.weights_digest
        self._check_order(where, record)
        self._check_fates(where, record)
        if not record.groups:
            return
        self._check_batch(where, record)
        self._record_digests[record.step] = record.digest
        report.steps = record.step
        if self._last_checkpoint is not None:
            self._check_covered(*self._last_checkpoint)
        self._last_checkpoint = self._checkpoints.pop(record.step, None)
        if self._last_checkpoint is not None:
            self._check_checkpoint(*self._last_checkpoint)

    def cut_short(self, where: str, message: str) -> None:
        """Records that the journal cannot be read further: nothing is known of later steps."""
        self.breach(Breach.DAMAGED, where, message)
        self._truncated = True

    def history(self, where: str, steps: Iterable[Mapping[str, Any]]) -> None:
        """Checks the job's step records, after the whole journal. Where a rollback wrote a step again, the newest counts."""
        newest = {int(step["step"]): step for step in steps}
        taken_over = max((rise.after_step for rise in self.rises), default=0)
        for number, step in sorted(newest.items()):
            self.report.history_steps += 1
            if self._truncated and number > self.report.steps:
                continue
            trained = self._trained.get(number)
            if trained is None and (number in self._missing or self.report.steps < number <= taken_over):
                continue
            if trained is None:
                self.breach(Breach.HISTORY, f"{where}, step {number}", "the journal does not hold this step")
            elif step.get("lineage", trained.lineage) == trained.lineage:
                self._check_step(f"{where}, step {number}", step, trained)

    def finish(self, where: str, *, ended: bool | None) -> AuditReport:
        """Makes the checks that need all records; `where` names the journal."""
        report = self.report
        report.ended = ended
        if self._last_checkpoint is not None and ended:
            self._check_covered(*self._last_checkpoint)
        for step, (place, state) in sorted(self._checkpoints.items()):
            if step == self._start or any(rise.after_step == step for rise in self.rises):
                self._take_over(state)
                continue  # the job continued from here
            self.breach(Breach.CHECKPOINT, place, f"the journal, which ends at step {report.steps}, has no step {step}")
        report.given_up = len(self._given_up)
        for group_id in range(report.issued if ended else 0):
            if group_id not in self._fates and group_id not in self._given_up:
                self.breach(Breach.NO_FATE, where, f"group {group_id} was issued and has no fate; the job has ended")
        return report

    def _check_order(self, where: str, record: BatchRecord) -> None:
        report = self.report
        expected = report.steps + 1 if record.groups else report.steps
        last = report.lineages[-1] if report.lineages else record.lineage
        if record.step > expected and record.lineage > last:
            self._give_up(range(expected, record.step))
            gap = f"{expected}–{record.step - 1}"
            report.remarks.append(f"{where}: the records of steps {gap} were given up; a checkpoint had them")
        elif record.step != expected and (report.lineages or self._start is not None):
            self.breach(Breach.STEPS, where, f"step {record.step} where step {expected} was due")
        if record.lineage < last:
            self.breach(Breach.LINEAGE, where, f"lineage {record.lineage} after lineage {last}")
        if record.lineage != last or not report.lineages:
            report.lineages.append(record.lineage)
        if self.rises and record.lineage not in {rise.lineage for rise in self.rises}:
            self.breach(Breach.LINEAGE, where, f"lineage {record.lineage} was never begun")
        if record.issued < report.issued:
            self.breach(Breach.NEVER_ISSUED, where, f"{record.issued} groups issued, and {report.issued} before")
        report.issued = max(report.issued, record.issued)

    def _give_up(self, steps: range) -> None:
        """The records of these steps are missing where the lineage rose: a checkpoint's knowledge of them counts."""
        self._missing.update(steps)
        found = [self._checkpoints.pop(step) for step in steps if step in self._checkpoints]
        self._blind |= not found
        for _, state in found:
            self._take_over(state)

    def _take_over(self, state: State) -> None:
        # No record had the unwritten ones by then: the next record has them.
        unwritten = {int(group_id) for group_id, *_ in state["ledger"]["unwritten"]}
        self._given_up |= set(_groups_with_fate(state)) - self._fates.keys() - unwritten

    def _check_fates(self, where: str, record: BatchRecord) -> None:
        for item in record.settled:
            group = f"group {item.group_id} is {item.fate}"
            earlier = self._fates.get(item.group_id)
            if earlier is not None:
                fate, step = earlier
                twice = fate is item.fate is Fate.TRAINED
                breach = Breach.TRAINED_TWICE if twice else Breach.TWO_FATES
                self.breach(breach, where, f"{group}, and was {fate} by the record of step {step}")
                continue
            if item.group_id in self._given_up:
                self.breach(Breach.TWO_FATES, where, f"{group}, and a checkpoint knew that it had a fate")
            if not 0 <= item.group_id < record.issued:
                self.breach(Breach.NEVER_ISSUED, where, f"{group} and was never issued")
            self._fates[item.group_id] = (item.fate, record.step)
            self.report.fates[item.fate] += 1
            if item.fate is Fate.FAILED:
                self.report.failed_reasons[item.reason] += 1

    def _check_batch(self, where: str, record: BatchRecord) -> None:
        batch = self._read_batch(where, record)
        settled = {item.group_id for item in record.settled if item.fate is Fate.TRAINED}
        for group_id, count in sorted(batch.ids.items()):
            if count > 1:
                self.breach(Breach.TRAINED_TWICE, where, f"group {group_id} stands {count} times in one batch")
            fate, step = self._fates.get(group_id, (None, 0))
            if group_id not in settled and fate is Fate.TRAINED:
                self.breach(Breach.TRAINED_TWICE, where, f"group {group_id} was trained by step {step}")
            elif group_id not in settled:
                self.breach(Breach.UNTRUE_FATE, where, f"group {group_id} is trained, and not said to be")
        for group_id in sorted(settled - batch.ids.keys()):
            self.breach(Breach.UNTRUE_FATE, where, f"group {group_id} is said to be trained and is not in the batch")
        self.report.policy_age_max = max(self.report.policy_age_max, batch.policy_age_max)
        self._trained[record.step] = batch

    def _read_batch(self, where: str, record: BatchRecord) -> _Batch:
        batch = _Batch(record.lineage, len(record.groups))
        for position, payload in enumerate(record.groups):
            try:
                group = decode(ScoredGroup, payload, self._limit_bytes).group
            except EntryError as error:
                self.breach(Breach.DAMAGED, where, f"the batch's group at place {position}: {error}")
                continue
            batch.ids[group.task.group_id] += 1
            for breach, message in _faults(group, record, self.report):
                self.breach(breach, f"{where}, group {group.task.group_id}", message)
            batch.policy_age_max = max(batch.policy_age_max, record.step - 1 - group.min_policy_version)
        return batch

    def _check_checkpoint(self, where: str, state: State) -> None:
        """A checkpoint knows at least the fates of the journal up to its step, and has trained exactly those."""
        ledger, report = state["ledger"], self.report
        frontier, beyond, counts = int(ledger["frontier"]), set(ledger["beyond"]), Counter[str](ledger["counts"])
        known, total = frontier + len(beyond), sum(counts.values())
        if total != known:
            self.breach(Breach.CHECKPOINT, where, f"its counts sum to {total} for {known} groups with a fate")
        journalled = report.fates[Fate.TRAINED]
        missing = counts[Fate.TRAINED] - journalled
        if missing < 0 or (missing > 0 and not self._missing):
            self.breach(Breach.CHECKPOINT, where, f"{counts[Fate.TRAINED]} groups trained, {journalled} in the journal")
        if int(ledger["issued"]) < report.issued:
            message = f"{ledger['issued']} groups issued, {report.issued} in the journal"
            self.breach(Breach.CHECKPOINT, where, message)
        for group_id, (fate, step) in self._fates.items():
            if group_id >= frontier and group_id not in beyond:
                self.breach(Breach.CHECKPOINT, where, f"group {group_id} has no fate, and was {fate} by step {step}")

    def _check_covered(self, where: str, state: State) -> None:
        """With its next record the journal has every fate that the checkpoint knows, and the counts agree."""
        known, counts = _groups_with_fate(state), state["ledger"]["counts"]
        lacking = set(known) - self._fates.keys() - self._given_up
        if self._blind:
            self._given_up, lacking = self._given_up | lacking, set()
        for group_id in sorted(lacking):
            self.breach(Breach.CHECKPOINT, where, f"group {group_id} has a fate that the journal does not tell")
        sums = Counter(self._fates[group_id][0] for group_id in known if group_id in self._fates)
        for fate in Fate:
            count = int(counts.get(fate, 0))
            if count != sums[fate] and len(known) == sums.total():
                self.breach(Breach.CHECKPOINT, where, f"{count} groups {fate}, {sums[fate]} of them in the journal")

    def _check_step(self, where: str, step: Mapping[str, Any], trained: _Batch) -> None:
        number = int(step["step"])
        expected = {
            "groups_trained": trained.groups,
            "policy_age_max": trained.policy_age_max,
            "weights_digest": self._digests.get(number) or None,
            "record_digest": self._record_digests[number],
        }
        for name, value in expected.items():
            if value is not None and step.get(name) not in (None, value):
                self.breach(Breach.HISTORY, where, f"{name} is {step[name]}, and {value} by the journal")


def _groups_with_fate(state: State) -> list[int]:
    return [*range(int(state["ledger"]["frontier"])), *state["ledger"]["beyond"]]


def _faults(group: RolloutGroup, record: BatchRecord, report: AuditReport) -> Iterator[tuple[Breach, str]]:
    task, version, bound = group.task, record.step - 1, report.max_off_policy_steps
    oldest, newest, age = group.min_policy_version, group.max_policy_version, version - group.min_policy_version
    if task.job_id != report.job_id or task.purpose is not Purpose.TRAIN or group.failure is not None:
        yield Breach.FOREIGN, f"a group of job {task.job_id}, for {task.purpose}, {group.failure or 'sampled'}"
    if task.lineage > record.lineage:
        yield Breach.LINEAGE, f"issued in lineage {task.lineage}, trained in lineage {record.lineage}"
    if newest > version:
        yield Breach.VERSION, f"sampled by version {newest}, when version {version} was the newest"
    if oldest < (wanted := task.min_policy_version):
        yield Breach.VERSION, f"sampled by version {oldest}, older than version {wanted} that was asked for"
    if age > bound:
        yield Breach.TOO_OLD, f"policy_age {age} exceeds max_off_policy_steps {bound}"
