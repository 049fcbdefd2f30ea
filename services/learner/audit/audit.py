"""The accounting oracle: rebuilds every group's fate from the job's own files and holds it against the invariants.

journal ──► records, in order ──► fates, versions, ages ──┐
checkpoints ──► ledger states ────────────────────────────┼──► violations
step history, state (where they are told) ────────────────┘

No counter of a service is believed, nothing is written, and no torch is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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


class Audit:
    """One job's audit: tell it everything in order, then `finish`."""

    def __init__(
        self,
        job_id: str,
        max_off_policy_steps: int,
        checkpoints: Mapping[int, tuple[str, State]],
        start_step: int | None = 0,
    ) -> None:
        """Nothing looked at yet.

        Args:
            job_id: the job.
            max_off_policy_steps: the bound on policy_age.
            checkpoints: step → (where, state), of all that verified.
            start_step: the step that the job began at; None where nothing says.
        """
        self.report = AuditReport(job_id, max_off_policy_steps=max_off_policy_steps, checkpoints=sorted(checkpoints))
        self.report.steps = start_step or 0
        self._start = start_step
        self._rises: list[Rise] = []
        self._checkpoints = dict(checkpoints)
        self._open: tuple[str, State] | None = None
        """The checkpoint of the newest step: every fate that it knows must be in the journal by the next step's record."""
        self._fates: dict[int, tuple[Fate, int]] = {}
        """group_id → fate and the step of its record."""
        self._trained: dict[int, Batch] = {}
        self._missing: set[int] = set()
        """Steps whose records were put aside where a lineage rose: their fates are in no record, only in a checkpoint."""
        self._blind = False
        """Whether the checkpoint that the job went on from then is not there any more: a later one has to do."""
        self._given_up: set[int] = set()
        """Groups whose fate stood in the records that are missing, as a checkpoint knows."""
        self._digests: dict[int, str] = {}
        """Policy version → digest of its weights."""
        self._cut_short = False
        self._record_digests: dict[int, str] = {}
        """Step → digest of the record that trains it."""

    def breach(self, breach: Breach, where: str, message: str) -> None:
        """Notes a violation."""
        self.report.violations.append(Violation(breach, where, message))

    def rises(self, rises: Iterable[Rise]) -> None:
        """Where each lineage began, as the job's folder says; nothing where it cannot be read."""
        self._rises = list(rises)

    @property
    def steps_journalled(self) -> list[int]:
        """The steps that the journal was found to train."""
        return sorted(self._trained)

    def record(self, where: str, record: BatchRecord) -> None:
        """The next record of the journal; one without groups carries fates only, and is of the last step."""
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
        if self._open is not None:
            self._check_covered(*self._open)
        self._open = self._checkpoints.pop(record.step, None)
        if self._open is not None:
            self._check_checkpoint(*self._open)

    def cut_short(self, where: str, message: str) -> None:
        """The journal cannot be read further: of later steps nothing is known."""
        self.breach(Breach.DAMAGED, where, message)
        self._cut_short = True

    def history(self, where: str, steps: Iterable[Mapping[str, Any]]) -> None:
        """The job's step records, once the journal was told whole; of one that was written again after a rollback the newest counts."""
        newest = {int(step["step"]): step for step in steps}
        for number, step in sorted(newest.items()):
            self.report.history_steps += 1
            if self._cut_short and number > self.report.steps:
                continue
            trained = self._trained.get(number)
            if trained is None and (number in self._missing or self.report.steps < number <= self._taken_over):
                continue
            if trained is None:
                self.breach(Breach.HISTORY, f"{where}, step {number}", "the journal does not hold this step")
            elif step.get("lineage", trained.lineage) == trained.lineage:
                self._check_step(f"{where}, step {number}", step, trained)

    @property
    def _taken_over(self) -> int:
        """The step that the newest lineage began after."""
        return max((rise.after_step for rise in self._rises), default=0)

    def finish(self, where: str, *, ended: bool | None) -> AuditReport:
        """Checks what can only be checked at the end; `where` names the journal."""
        report = self.report
        report.ended = ended
        if self._open is not None and ended:
            self._check_covered(*self._open)
        for step, (place, state) in sorted(self._checkpoints.items()):
            if step == self._start or any(rise.after_step == step for rise in self._rises):
                self._take_over(state)
                continue  # the job went on from here
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
            self._give_up(expected, record.step)
            report.remarks.append(
                f"{where}: the records of steps {expected}–{record.step - 1} were given up; a checkpoint had them"
            )
        elif record.step != expected and (report.lineages or self._start is not None):
            self.breach(Breach.STEPS, where, f"step {record.step} where step {expected} was due")
        if record.lineage < last:
            self.breach(Breach.LINEAGE, where, f"lineage {record.lineage} after lineage {last}")
        if record.lineage != last or not report.lineages:
            report.lineages.append(record.lineage)
        if self._rises and record.lineage not in {rise.lineage for rise in self._rises}:
            self.breach(Breach.LINEAGE, where, f"lineage {record.lineage} was never begun")
        if record.issued < report.issued:
            self.breach(Breach.NEVER_ISSUED, where, f"{record.issued} groups issued, and {report.issued} before")
        report.issued = max(report.issued, record.issued)

    def _give_up(self, first: int, end: int) -> None:
        """The records of steps `first` to below `end` are missing where the lineage rose: what a checkpoint knows of them counts."""
        steps = range(first, end)
        self._missing.update(steps)
        found = [self._checkpoints.pop(step) for step in steps if step in self._checkpoints]
        self._blind |= not found
        for _, state in found:
            self._take_over(state)

    def _take_over(self, state: State) -> None:
        self._given_up |= set(_known(state)) - self._fates.keys() - _unwritten(state)

    def _check_fates(self, where: str, record: BatchRecord) -> None:
        for item in record.settled:
            earlier = self._fates.get(item.group_id)
            if earlier is not None:
                fate, step = earlier
                twice = fate is item.fate is Fate.TRAINED
                breach = Breach.TRAINED_TWICE if twice else Breach.TWO_FATES
                self.breach(
                    breach, where, f"group {item.group_id} is {item.fate}, and was {fate} by the record of step {step}"
                )
                continue
            if item.group_id in self._given_up:
                self.breach(
                    Breach.TWO_FATES,
                    where,
                    f"group {item.group_id} is {item.fate}, and a checkpoint knew that it had a fate",
                )
            if not 0 <= item.group_id < record.issued:
                self.breach(Breach.NEVER_ISSUED, where, f"group {item.group_id} is {item.fate} and was never issued")
            self._fates[item.group_id] = (item.fate, record.step)
            self.report.fates[item.fate] += 1
            if item.fate is Fate.FAILED:
                self.report.failed_reasons[item.reason] += 1

    def _check_batch(self, where: str, record: BatchRecord) -> None:
        report = self.report
        bound = report.max_off_policy_steps
        batch = check_batch(where, record, job_id=report.job_id, max_off_policy_steps=bound, note=self.breach)
        said = {item.group_id for item in record.settled if item.fate is Fate.TRAINED}
        for group_id, count in sorted(batch.ids.items()):
            if count > 1:
                self.breach(Breach.TRAINED_TWICE, where, f"group {group_id} stands {count} times in one batch")
            fate, step = self._fates.get(group_id, (None, 0))
            if group_id not in said and fate is Fate.TRAINED:
                self.breach(Breach.TRAINED_TWICE, where, f"group {group_id} was trained by step {step}")
            elif group_id not in said:
                self.breach(Breach.UNTRUE_FATE, where, f"group {group_id} is trained, and not said to be")
        for group_id in sorted(said - batch.ids.keys()):
            self.breach(Breach.UNTRUE_FATE, where, f"group {group_id} is said to be trained and is not in the batch")
        report.policy_age_max = max(report.policy_age_max, batch.policy_age_max)
        self._trained[record.step] = batch

    def _check_checkpoint(self, where: str, state: State) -> None:
        """A checkpoint knows at least the fates of the journal up to its step, and has trained exactly those."""
        ledger = state["ledger"]
        frontier, beyond, counts = int(ledger["frontier"]), set(ledger["beyond"]), Counter[str](ledger["counts"])
        if sum(counts.values()) != frontier + len(beyond):
            told = frontier + len(beyond)
            self.breach(
                Breach.CHECKPOINT, where, f"its counts sum to {sum(counts.values())} for {told} groups with a fate"
            )
        missing = counts[Fate.TRAINED] - self.report.fates[Fate.TRAINED]
        if missing < 0 or (missing > 0 and not self._missing):
            journalled = self.report.fates[Fate.TRAINED]
            self.breach(Breach.CHECKPOINT, where, f"{counts[Fate.TRAINED]} groups trained, {journalled} in the journal")
        if int(ledger["issued"]) < self.report.issued:
            self.breach(
                Breach.CHECKPOINT, where, f"{ledger['issued']} groups issued, {self.report.issued} in the journal"
            )
        for group_id, (fate, step) in self._fates.items():
            if group_id >= frontier and group_id not in beyond:
                self.breach(Breach.CHECKPOINT, where, f"group {group_id} has no fate, and was {fate} by step {step}")

    def _check_covered(self, where: str, state: State) -> None:
        """The journal's next record tells every fate that the checkpoint knew beyond it, and they sum up."""
        known, counts = _known(state), state["ledger"]["counts"]
        untold = set(known) - self._fates.keys() - self._given_up
        if self._blind:
            self._given_up, untold = self._given_up | untold, set()
        for group_id in sorted(untold):
            self.breach(Breach.CHECKPOINT, where, f"group {group_id} has a fate that the journal does not tell")
        sums = Counter(self._fates[group_id][0] for group_id in known if group_id in self._fates)
        for fate in Fate:
            count = int(counts.get(fate, 0))
            if count != sums[fate] and len(known) == sums.total():
                self.breach(Breach.CHECKPOINT, where, f"{count} groups {fate}, {sums[fate]} of them in the journal")

    def _check_step(self, where: str, step: Mapping[str, Any], trained: Batch) -> None:
        expected: dict[str, object] = {"groups_trained": trained.groups, "policy_age_max": trained.policy_age_max}
        expected["weights_digest"] = self._digests.get(int(step["step"])) or None
        expected["record_digest"] = self._record_digests[int(step["step"])]
        for name, value in expected.items():
            if value is not None and step.get(name) not in (None, value):
                self.breach(Breach.HISTORY, where, f"{name} is {step[name]}, and {value} by the journal")


def _known(state: State) -> list[int]:
    """The groups that have a fate, as a checkpoint knows."""
    return [*range(int(state["ledger"]["frontier"])), *state["ledger"]["beyond"]]


def _unwritten(state: State) -> set[int]:
    """Those of them that no record had by then: the next one tells them."""
    return {int(group_id) for group_id, *_ in state["ledger"]["unwritten"]}


Note = Callable[[Breach, str, str], None]
"""Notes a violation: kind, where, message."""


@dataclass(slots=True)
class Batch:
    """What a record was found to train."""

    lineage: int
    groups: int
    policy_age_max: int = 0
    ids: Counter[int] = field(default_factory=Counter)
    """How often each group stands in it."""


def check_batch(where: str, record: BatchRecord, *, job_id: str, max_off_policy_steps: int, note: Note) -> Batch:
    """Reads every group of the record and checks job, lineage, versions and age."""
    batch = Batch(record.lineage, len(record.groups))
    for position, payload in enumerate(record.groups):
        try:
            group = decode(ScoredGroup, payload).group
        except EntryError as error:
            note(Breach.DAMAGED, where, f"the batch's group at place {position}: {error}")
            continue
        batch.ids[group.task.group_id] += 1
        place = f"{where}, group {group.task.group_id}"
        for breach, message in _faults(group, record, job_id, max_off_policy_steps):
            note(breach, place, message)
        batch.policy_age_max = max(batch.policy_age_max, record.step - 1 - group.min_policy_version)
    return batch


def _faults(group: RolloutGroup, record: BatchRecord, job_id: str, bound: int) -> list[tuple[Breach, str]]:
    task, version = group.task, record.step - 1
    oldest, newest, age = group.min_policy_version, group.max_policy_version, version - group.min_policy_version
    faults = [
        (
            task.job_id != job_id or task.purpose is not Purpose.TRAIN or group.failure is not None,
            Breach.FOREIGN,
            f"a group of job {task.job_id}, for {task.purpose}, {group.failure or 'sampled'}",
        ),
        (
            task.lineage > record.lineage,
            Breach.LINEAGE,
            f"issued in lineage {task.lineage}, trained in lineage {record.lineage}",
        ),
        (newest > version, Breach.VERSION, f"sampled by version {newest}, when version {version} was the newest"),
        (
            oldest < task.min_policy_version,
            Breach.VERSION,
            f"sampled by version {oldest}, older than version {task.min_policy_version} that was asked for",
        ),
        (age > bound, Breach.TOO_OLD, f"policy_age {age} exceeds max_off_policy_steps {bound}"),
    ]
    return [(breach, message) for wrong, breach, message in faults if wrong]
