"""A finished job's folder, written by the real ledger, journal and checkpoint store; a test may change what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import WrittenFile, digest_of_file, manifest_digest
from services.common.jobs.fates import Fate
from services.common.jobs.folder import HISTORY_FILE, SPEC_FILE, JobFolder
from services.common.jobs.history_mark import HistoryReader
from services.common.spec.job import dump_spec
from services.common.spec.rollout import RolloutSpec
from services.common.streams.codec import encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.groups.ledger import Ledger
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.journal import BatchRecord, Journal
from services.learner.storage.journal_key import JournalKey
from tests.unit.learner.scored_groups import make_spec, scored_group

STEPS, BATCH, BOUND = 5, 2, 1
CHECKPOINT = 3
"""Step of the checkpoint that is written beside the last one."""


def group_of(group_id: int, *versions: int, **changes: Any) -> ScoredGroup:
    """An informative group of this job; `changes` are to its task."""
    made = scored_group(group_id, (1.0, 0.0), versions=versions)
    task = replace(made.group.task, **changes)
    return replace(made, group=replace(made.group, task=task))


def digest(version: int) -> str:
    """Stands for the digest of a version's weights."""
    return f"{version:032x}"


class JournalledJob:
    """Each step issues four groups: two are trained, one is degenerate, and one fails; the job's last group is cancelled."""

    def __init__(self, job_id: str = "job") -> None:
        """Decides everything; nothing is written yet."""
        self.records: list[BatchRecord] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.history: list[dict[str, Any]] = []
        self.key: JournalKey | None = None
        self.identity: dict[str, Any] = {}
        """What the checkpoints say that they were made of."""
        self.rollout: dict[str, Any] = {}
        """Section `rollout` of its spec."""
        self.early = False
        """Written as an earlier release did: no history, and no mark of one."""
        ledger = Ledger()
        for step in range(1, STEPS + 1):
            first = ledger.issue(step - 1).group_id
            for _ in range(3):
                ledger.issue(step - 1)
            versions = ((first, max(0, step - 2)), (first + 1, step - 1))
            groups = [group_of(group_id, version, job_id=job_id) for group_id, version in versions]
            for fate, group_id in ((Fate.TRAINED, first), (Fate.TRAINED, first + 1), (Fate.DEGENERATE, first + 2)):
                ledger.settle(group_id, fate)
            self._write(step, ledger, groups)
            ledger.settle(first + 3, Fate.FAILED, "only 1 of 2 rollouts could be judged")
            self.states[step] = ledger.state()
            age = min(step - 1, 1)
            self.history.append(
                {"step": step, "lineage": 1, "policy_version": step, "groups_trained": 2, "policy_age_max": age}
                | {"weights_digest": digest(step)}
            )
        self.before_the_end = ledger.state()
        ledger.settle(ledger.issue(STEPS).group_id, Fate.CANCELLED, "the job succeeded")
        self._write(STEPS, ledger, [], digest(STEPS))
        self.states[STEPS] = ledger.state()

    def _write(self, step: int, ledger: Ledger, groups: Sequence[ScoredGroup], weights: str = "") -> None:
        settled = tuple(ledger.take_unwritten())
        payloads = tuple(encode(group, MIN_ENTRY_BYTES) for group in groups)
        self.records.append(BatchRecord(step, 1, payloads, settled, ledger.issued, weights or digest(step - 1)))

    def change(self, step: int, **changes: Any) -> None:
        """Changes the record that trains this step."""
        self.records[step - 1] = replace(self.records[step - 1], **changes)

    def change_groups(self, step: int, change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Changes the batch of this step."""
        self.change(step, groups=tuple(change(list(self.records[step - 1].groups))))

    def write(self, folder: Path) -> Path:
        """Writes the job's folder, in the learner's order, but for `job.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        spec = make_spec(BATCH, BOUND).model_copy(update={"rollout": RolloutSpec(**self.rollout)})
        (folder / SPEC_FILE).write_text(dump_spec(spec))
        journal, store = Journal(folder / "journal", self.key), CheckpointStore(folder / "checkpoints", keep=2)
        history, reader = JobFolder(folder), HistoryReader(folder / HISTORY_FILE)
        for record in self.records:
            marked = record if self.early else replace(record, history=reader.mark())
            journal.append(marked)
            if record.groups and not self.early:
                history.append("step", record.step, self.history[record.step - 1] | {"record_digest": marked.digest})
            if record.step in {CHECKPOINT, STEPS} and bool(record.groups) is (record.step != STEPS):
                self._save(store, history, record.step)
        for step in {CHECKPOINT, STEPS} - {int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")}:
            self._save(store, history, step)  # a test took its record away
        return folder

    def _save(self, store: CheckpointStore, history: JobFolder, step: int) -> None:
        weights = store.begin(step) / "weights"
        weights.write_bytes(bytes([step]))
        state = {"lineage": 1, "ledger": self.states[step], "start_step": 0, "identity": self.identity}
        files = [WrittenFile("weights", 1, digest_of_file(weights))]
        if not self.early:
            history.append("checkpoint", step, {"manifest": manifest_digest(step, state, files)})
        store.commit(step, state, files)
