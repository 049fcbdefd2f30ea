"""The oracle passes what is right and catches each thing that must not be: a test that it can fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from services.common.codec import decode, encode
from services.common.errors import ConfigError
from services.common.fates import Fate
from services.common.job_folder import FORMAT, JOB_FILE
from services.common.types import Purpose, ScoredGroup
from services.learner.audit_files import audit_job
from services.learner.audit_report import AuditReport, Breach
from services.learner.journal import Journal
from services.learner.ledger import Settled
from services.learner.lineage import raise_lineage, read_rises
from tests.unit.learner.journalled_job import CHECKPOINT, STEPS, JournalledJob, group_of

Mutation = Callable[[JournalledJob], None]


def audited(job: JournalledJob, tmp_path: Path, **options: Any) -> AuditReport:
    return audit_job(job.write(tmp_path / "job"), **({"told_state": "succeeded"} | options))


def breaches(report: AuditReport) -> set[Breach]:
    return {violation.breach for violation in report.violations}


def settle(job: JournalledJob, step: int, *settled: Settled) -> None:
    job.change(step, settled=job.records[step - 1].settled + settled)


def unsettle(job: JournalledJob, step: int, group_id: int) -> None:
    job.change(step, settled=tuple(s for s in job.records[step - 1].settled if s.group_id != group_id))


def test_a_sound_job_has_no_violation_and_its_fates_sum_to_the_groups_issued(tmp_path: Path) -> None:
    job = JournalledJob()
    report = audited(job, tmp_path, told=job.history)
    assert report.violations == []
    assert report.remarks == []
    assert (report.issued, report.active, report.steps, report.records) == (4 * STEPS + 1, 0, STEPS, STEPS + 1)
    assert report.fates == {Fate.TRAINED: 10, Fate.DEGENERATE: 5, Fate.FAILED: 5, Fate.CANCELLED: 1}
    assert report.failed_reasons == {"only 1 of 2 rollouts could be judged": 5}
    assert (report.policy_age_max, report.lineages, report.checkpoints) == (1, [1], [CHECKPOINT, STEPS])
    assert report.history_steps == STEPS
    assert json.loads(json.dumps(report.as_record()))["ok"] is True


def test_the_job_is_left_as_it_was(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")

    def contents() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}

    before = contents()
    audit_job(folder)
    assert contents() == before


def test_groups_without_a_fate_are_active_until_the_job_has_ended(tmp_path: Path) -> None:
    job = JournalledJob()
    job.records.pop()
    job.states[STEPS] = job.before_the_end
    folder = job.write(tmp_path / "job")
    running = audit_job(folder, told_state="running")
    assert (running.active, running.violations) == (1, [])
    assert Breach.NO_FATE in breaches(audit_job(folder, told_state="failed"))
    nobody_says = audit_job(folder)
    assert nobody_says.ended is None
    assert "whether the job has ended" in nobody_says.remarks[-1]


def two_fates(job: JournalledJob) -> None:
    settle(job, 4, Settled(2, Fate.FAILED, "again"))  # degenerate at step 1


def trained_in_two_steps(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [*groups, encode(group_of(9, 2))])
    settle(job, 4, Settled(9, Fate.TRAINED))


def trained_again_silently(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [*groups, encode(group_of(9, 2))])


def twice_in_one_batch(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [*groups, groups[0]])


def lost(job: JournalledJob) -> None:
    unsettle(job, 5, 18)


def fate_of_nobody(job: JournalledJob) -> None:
    settle(job, 2, Settled(99, Fate.STALE))


def fewer_issued(job: JournalledJob) -> None:
    job.change(3, issued=7)


def said_but_not_in_the_batch(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: groups[1:])


def in_the_batch_but_not_said(job: JournalledJob) -> None:
    unsettle(job, 4, 12)


def lineage_falls(job: JournalledJob) -> None:
    job.change(2, lineage=2)


def group_of_a_later_lineage(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 2, lineage=2)), groups[1]])


def too_old(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 1)), groups[1]])


def from_the_future(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 3, 4)), groups[1]])


def older_than_asked_for(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 2, min_policy_version=3)), groups[1]])


def of_another_job(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 3, job_id="other")), groups[1]])


def of_an_evaluation(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 3, purpose=Purpose.EVAL)), groups[1]])


def versions_within_a_sample_fall(job: JournalledJob) -> None:
    def fall(groups: list[bytes]) -> list[bytes]:
        document = msgpack.unpackb(groups[0])
        document["group"]["rollouts"][0]["versions"] = [
            {"start": 0, "policy_version": 3}, {"start": 1, "policy_version": 2},
        ]  # fmt: skip
        return [msgpack.packb(document), *groups[1:]]

    job.change_groups(4, fall)


def not_a_group(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [b"\xc1", *groups[1:]])


def a_step_is_missing(job: JournalledJob) -> None:
    del job.records[1]


def a_step_is_repeated(job: JournalledJob) -> None:
    job.records.insert(2, job.records[1])


def begins_late(job: JournalledJob) -> None:
    del job.records[0]


def checkpoint_counts(job: JournalledJob) -> None:
    state = job.states[CHECKPOINT]
    job.states[CHECKPOINT] = state | {"counts": state["counts"] | {"trained": 7}}


def checkpoint_swaps_two_fates(job: JournalledJob) -> None:
    state = job.states[CHECKPOINT]
    counts = state["counts"] | {
        "degenerate": state["counts"]["degenerate"] + 1,
        "failed": state["counts"]["failed"] - 1,
    }
    job.states[CHECKPOINT] = state | {"counts": counts}


def checkpoint_forgets_a_fate(job: JournalledJob) -> None:
    state = job.states[CHECKPOINT]
    counts = state["counts"] | {"failed": 2}
    job.states[CHECKPOINT] = state | {"frontier": 3, "beyond": [4, 5, 6, 7, 8, 9, 10, 11], "counts": counts}


def checkpoint_knows_more_than_the_journal(job: JournalledJob) -> None:
    unsettle(job, 4, 11)  # failed after step 3's record, known to the checkpoint of step 3


def checkpoint_of_no_step(job: JournalledJob) -> None:
    del job.records[STEPS - 1 :]


CASES: list[tuple[Mutation, Breach]] = [
    (two_fates, Breach.TWO_FATES),
    (trained_in_two_steps, Breach.TRAINED_TWICE),
    (trained_again_silently, Breach.TRAINED_TWICE),
    (twice_in_one_batch, Breach.TRAINED_TWICE),
    (lost, Breach.NO_FATE),
    (fate_of_nobody, Breach.NEVER_ISSUED),
    (fewer_issued, Breach.NEVER_ISSUED),
    (said_but_not_in_the_batch, Breach.UNTRUE_FATE),
    (in_the_batch_but_not_said, Breach.UNTRUE_FATE),
    (lineage_falls, Breach.LINEAGE),
    (group_of_a_later_lineage, Breach.LINEAGE),
    (too_old, Breach.TOO_OLD),
    (from_the_future, Breach.VERSION),
    (older_than_asked_for, Breach.VERSION),
    (of_another_job, Breach.FOREIGN),
    (of_an_evaluation, Breach.FOREIGN),
    (versions_within_a_sample_fall, Breach.DAMAGED),
    (not_a_group, Breach.DAMAGED),
    (a_step_is_missing, Breach.DAMAGED),
    (a_step_is_repeated, Breach.DAMAGED),
    (begins_late, Breach.STEPS),
    (checkpoint_counts, Breach.CHECKPOINT),
    (checkpoint_swaps_two_fates, Breach.CHECKPOINT),
    (checkpoint_forgets_a_fate, Breach.CHECKPOINT),
    (checkpoint_knows_more_than_the_journal, Breach.CHECKPOINT),
    (checkpoint_of_no_step, Breach.CHECKPOINT),
]


@pytest.mark.parametrize(("mutation", "breach"), CASES, ids=[mutation.__name__ for mutation, _ in CASES])
def test_each_violation_is_caught_and_named_with_its_place(mutation: Mutation, breach: Breach, tmp_path: Path) -> None:
    job = JournalledJob()
    mutation(job)
    report = audited(job, tmp_path)
    assert breach in breaches(report), report.violations
    assert report.as_record()["ok"] is False
    for violation in report.violations:
        assert violation.where.startswith(("journal", "checkpoints/"))
        assert violation.message


def test_every_kind_of_violation_has_a_case() -> None:
    assert {breach for _, breach in CASES} | {Breach.HISTORY} == set(Breach)


@pytest.mark.parametrize(
    "change", [{"groups_trained": 3}, {"policy_age_max": 0}, {"weights_digest": "f" * 32}, {"step": 99}]
)
def test_a_history_that_disagrees_with_the_journal_is_caught(change: dict[str, Any], tmp_path: Path) -> None:
    job = JournalledJob()
    changed = [*job.history[:2], job.history[2] | change]
    assert breaches(audited(job, tmp_path, told=changed)) == {Breach.HISTORY}


def test_a_step_of_a_lineage_that_was_given_up_is_not_held_against_the_journal(tmp_path: Path) -> None:
    job = JournalledJob()
    old = [job.history[1] | {"lineage": 0, "groups_trained": 9}]
    assert audited(job, tmp_path, told=old).violations == []


def test_any_flipped_byte_of_the_journal_is_a_violation_and_never_a_crash(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    [segment] = (folder / "journal").glob("*.wal")
    data = segment.read_bytes()
    for position in range(0, len(data), 97):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
        assert Breach.DAMAGED in breaches(audit_job(folder)), position


def test_a_damaged_checkpoint_is_a_remark_for_recovery_passes_it_over(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    (folder / "checkpoints" / "step-00000003" / "weights").write_bytes(b"xx")
    report = audit_job(folder, told_state="succeeded")
    assert report.violations == []
    assert (report.checkpoints, len(report.remarks)) == ([STEPS], 1)


def given_up(job: JournalledJob, folder: Path, *, checkpoint: bool = True) -> Path:
    """Step 3's record was damaged: the job went on from the checkpoint of step 3, in the next lineage."""
    job.records = [*job.records[:2], *(replace(record, lineage=2) for record in job.records[3:])]
    job.write(folder)
    raise_lineage(folder, read_rises(folder), 2, 3, "a record was damaged")
    if not checkpoint:
        shutil.rmtree(folder / "checkpoints" / "step-00000003")
    return folder


@pytest.mark.parametrize("checkpoint", [True, False])
def test_records_that_were_given_up_are_a_remark_and_their_groups_are_counted(tmp_path: Path, checkpoint: bool) -> None:
    job = JournalledJob()
    folder = given_up(job, tmp_path / "job", checkpoint=checkpoint)
    report = audit_job(folder, told=job.history, told_state="succeeded")
    assert report.violations == []
    assert (report.lineages, report.given_up, report.active) == ([1, 2], 4, 0)
    assert "the records of steps 3–3 were given up" in report.remarks[0]


def test_a_group_that_no_checkpoint_knows_either_is_lost(tmp_path: Path) -> None:
    job = JournalledJob()
    unsettle(job, 5, 18)
    assert breaches(audit_job(given_up(job, tmp_path / "job"), told_state="succeeded")) >= {Breach.NO_FATE}


def test_a_group_that_was_trained_in_a_record_given_up_and_again_is_caught(tmp_path: Path) -> None:
    job = JournalledJob()
    job.change_groups(4, lambda groups: [*groups, encode(group_of(8, 2))])
    settle(job, 4, Settled(8, Fate.TRAINED))
    assert Breach.TWO_FATES in breaches(audit_job(given_up(job, tmp_path / "job"), told_state="succeeded"))


def test_a_gap_without_a_lineage_that_was_begun_is_caught(tmp_path: Path) -> None:
    folder = given_up(JournalledJob(), tmp_path / "job")
    (folder / "lineage.json").unlink()
    assert breaches(audit_job(folder, told_state="succeeded")) == {Breach.LINEAGE}


def test_a_job_that_has_just_gone_on_from_a_checkpoint_beyond_its_journal_is_sound(tmp_path: Path) -> None:
    folder = given_up(JournalledJob(), tmp_path / "job")
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    shutil.rmtree(folder / "journal")
    journal = Journal(folder / "journal")
    for record in JournalledJob().records[:2]:
        journal.append(record)
    report = audit_job(folder, told=JournalledJob().history[:3], told_state="running")
    assert (report.violations, report.given_up) == ([], 4)
    (folder / "lineage.json").unlink()
    assert breaches(audit_job(folder, told_state="running")) == {Breach.CHECKPOINT}


def told(step: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "step", "step": step["step"], "data": step}


def test_what_the_folder_says_of_the_job_counts(tmp_path: Path) -> None:
    job = JournalledJob()
    folder = job.write(tmp_path / "job")
    (folder / JOB_FILE).write_text(json.dumps({"format": FORMAT, "state": "succeeded"}))
    lost = {"kind": "step", "step": 4, "data": {"step": 4, "groups_trained": 9}}
    lines = [{"kind": "eval", "step": 0, "data": {"step": 0}}, *map(told, job.history[:3]), lost]
    lines += [{"kind": "rewind", "step": 3, "data": {}}, *map(told, job.history[3:])]
    (folder / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "st')
    report = audit_job(folder)
    assert (report.violations, report.ended, report.history_steps) == ([], True, STEPS)


def test_a_folder_without_a_job_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing-here/spec\.yaml: No such file"):
        audit_job(tmp_path / "nothing-here")


def test_a_group_reads_back_as_it_was_written() -> None:
    group = group_of(3, 1, 2)
    assert decode(ScoredGroup, encode(group)) == replace(group)
