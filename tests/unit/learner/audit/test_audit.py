"""The oracle passes what is right and catches each thing that must not be: a test that it can fail."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash

from services.common.checkpoints.manifest import MANIFEST, WrittenFile, digest_of_file, manifest_digest
from services.common.errors import ConfigError
from services.common.jobs.fates import Fate
from services.common.jobs.folder import FORMAT, JOB_FILE, JobFolder
from services.common.jobs.history_mark import HistoryReader
from services.common.spec.job import dump_spec
from services.common.streams.codec import decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import Purpose, ScoredGroup
from services.learner.audit import files as audit_files
from services.learner.audit.files import audit_job
from services.learner.audit.report import AuditReport, Breach
from services.learner.groups.ledger import Ledger, Settled
from services.learner.storage import checkpoints as evidence
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.journal import BatchRecord, Journal, _scan
from services.learner.storage.journal_key import JournalKey
from services.learner.storage.lineage import raise_lineage, read_rises
from tests.unit.learner.journalled_job import BATCH, BOUND, CHECKPOINT, STEPS, JournalledJob, digest, group_of
from tests.unit.learner.scored_groups import make_spec

Mutation = Callable[[JournalledJob], None]


def audited(job: JournalledJob, tmp_path: Path, **options: Any) -> AuditReport:
    return audit_job(job.write(tmp_path / "job"), **({"reported_state": "succeeded"} | options))


def breaches(report: AuditReport) -> set[Breach]:
    return {violation.breach for violation in report.violations}


def settle(job: JournalledJob, step: int, *settled: Settled) -> None:
    job.change(step, settled=job.records[step - 1].settled + settled)


def unsettle(job: JournalledJob, step: int, group_id: int) -> None:
    job.change(step, settled=tuple(s for s in job.records[step - 1].settled if s.group_id != group_id))


def test_a_sound_job_has_no_violation_and_its_fates_sum_to_the_groups_issued(tmp_path: Path) -> None:
    job = JournalledJob()
    report = audited(job, tmp_path, reported_steps=job.history)
    assert report.violations == []
    assert report.remarks == []
    assert (report.issued, report.active, report.steps, report.records) == (4 * STEPS + 1, 0, STEPS, STEPS + 1)
    assert report.fates == {Fate.TRAINED: 10, Fate.DEGENERATE: 5, Fate.FAILED: 5, Fate.CANCELLED: 1}
    assert report.failed_reasons == {"only 1 of 2 rollouts could be judged": 5}
    assert (report.policy_age_max, report.lineages, report.checkpoints) == (1, [1], [CHECKPOINT, STEPS])
    assert report.history_steps == 2 * STEPS, "the folder's and the gateway's"
    assert json.loads(json.dumps(report.as_record()))["ok"] is True


def test_a_group_is_audited_up_to_the_limit_of_its_job(tmp_path: Path) -> None:
    large = group_of(12, 2)
    rollouts = tuple(replace(rollout, text="x" * MIN_ENTRY_BYTES) for rollout in large.group.rollouts)
    large = replace(large, group=replace(large.group, rollouts=rollouts))
    for rollout, expected in (
        ({}, [Breach.DAMAGED, Breach.UNTRUE_FATE, Breach.HISTORY]),
        ({"rollout_max_tokens": 65_536}, []),
    ):
        job = JournalledJob()
        job.rollout = rollout
        job.change_groups(4, lambda groups: [encode(large, 4 * MIN_ENTRY_BYTES), *groups[1:]])
        found = audited(job, tmp_path / str(len(rollout)))
        assert [violation.breach for violation in found.violations] == expected


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
    running = audit_job(folder, reported_state="running")
    assert (running.active, running.violations) == (1, [])
    assert Breach.NO_FATE in breaches(audit_job(folder, reported_state="failed"))
    nobody_says = audit_job(folder)
    assert nobody_says.ended is None
    assert "whether the job has ended" in nobody_says.remarks[-1]


def two_fates(job: JournalledJob) -> None:
    settle(job, 4, Settled(2, Fate.FAILED, "again"))  # degenerate at step 1


def trained_in_two_steps(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [*groups, encode(group_of(9, 2), MIN_ENTRY_BYTES)])
    settle(job, 4, Settled(9, Fate.TRAINED))


def trained_again_silently(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [*groups, encode(group_of(9, 2), MIN_ENTRY_BYTES)])


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
    job.change_groups(4, lambda groups: [encode(group_of(12, 2, lineage=2), MIN_ENTRY_BYTES), groups[1]])


def too_old(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 1), MIN_ENTRY_BYTES), groups[1]])


def from_the_future(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 3, 4), MIN_ENTRY_BYTES), groups[1]])


def older_than_asked_for(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 2, min_policy_version=3), MIN_ENTRY_BYTES), groups[1]])


def of_another_job(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 3, job_id="other"), MIN_ENTRY_BYTES), groups[1]])


def of_an_evaluation(job: JournalledJob) -> None:
    job.change_groups(4, lambda groups: [encode(group_of(12, 3, purpose=Purpose.EVAL), MIN_ENTRY_BYTES), groups[1]])


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
        assert violation.where.startswith(("journal", "checkpoints/", "history.jsonl"))
        assert violation.message


def test_every_kind_of_violation_has_a_case() -> None:
    assert {breach for _, breach in CASES} | {Breach.HISTORY, Breach.SEAL, Breach.SPEC} == set(Breach)


@pytest.mark.parametrize(
    "change", [{"groups_trained": 3}, {"policy_age_max": 0}, {"weights_digest": "f" * 32}, {"step": 99}]
)
def test_a_history_that_disagrees_with_the_journal_is_caught(change: dict[str, Any], tmp_path: Path) -> None:
    job = JournalledJob()
    changed = [*job.history[:2], job.history[2] | change]
    assert breaches(audited(job, tmp_path, reported_steps=changed)) == {Breach.HISTORY}


def test_a_step_of_a_lineage_that_was_given_up_is_not_held_against_the_journal(tmp_path: Path) -> None:
    job = JournalledJob()
    old = [job.history[1] | {"lineage": 0, "groups_trained": 9}]
    assert audited(job, tmp_path, reported_steps=old).violations == []


def test_any_flipped_byte_of_the_journal_is_a_violation_and_never_a_crash(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    [segment] = (folder / "journal").glob("*.wal")
    data = segment.read_bytes()
    for position in range(0, len(data), 97):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
        assert Breach.DAMAGED in breaches(audit_job(folder)), position


def test_a_damaged_checkpoint_that_the_job_keeps_is_a_violation_and_an_older_one_a_remark(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    (folder / "checkpoints" / "step-00000003" / "weights").write_bytes(b"xx")
    report = audit_job(folder, reported_state="succeeded")
    assert [(v.breach, v.where) for v in report.violations] == [(Breach.CHECKPOINT, "checkpoints/step-00000003")]
    assert (report.checkpoints, report.remarks) == ([STEPS], [])
    spec = (folder / "spec.yaml").read_text()
    (folder / "spec.yaml").write_text(spec.replace("keep_last: 2", "keep_last: 1"))
    report = audit_job(folder, reported_state="succeeded")
    assert (report.violations, len(report.remarks)) == ([], 1)


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
    report = audit_job(folder, reported_steps=job.history, reported_state="succeeded")
    assert report.violations == []
    assert (report.lineages, report.given_up, report.active) == ([1, 2], 4, 0)
    assert "the records of steps 3–3 were given up" in report.remarks[0]


def test_a_group_that_no_checkpoint_knows_either_is_lost(tmp_path: Path) -> None:
    job = JournalledJob()
    unsettle(job, 5, 18)
    assert breaches(audit_job(given_up(job, tmp_path / "job"), reported_state="succeeded")) >= {Breach.NO_FATE}


def test_a_group_that_was_trained_in_a_record_given_up_and_again_is_caught(tmp_path: Path) -> None:
    job = JournalledJob()
    job.change_groups(4, lambda groups: [*groups, encode(group_of(8, 2), MIN_ENTRY_BYTES)])
    settle(job, 4, Settled(8, Fate.TRAINED))
    assert Breach.TWO_FATES in breaches(audit_job(given_up(job, tmp_path / "job"), reported_state="succeeded"))


def test_a_gap_without_a_lineage_that_was_begun_is_caught(tmp_path: Path) -> None:
    folder = given_up(JournalledJob(), tmp_path / "job")
    (folder / "lineage.json").unlink()
    assert breaches(audit_job(folder, reported_state="succeeded")) == {Breach.LINEAGE}


def test_a_job_that_has_just_gone_on_from_a_checkpoint_beyond_its_journal_is_sound(tmp_path: Path) -> None:
    folder = given_up(JournalledJob(), tmp_path / "job")
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    shutil.rmtree(folder / "journal")
    (folder / "history.jsonl").unlink()
    journal = Journal(folder / "journal")
    for record in JournalledJob().records[:2]:
        journal.append(record)
    report = audit_job(folder, reported_steps=JournalledJob().history[:3], reported_state="running")
    assert (report.violations, report.given_up) == ([], 4)
    (folder / "lineage.json").unlink()
    assert breaches(audit_job(folder, reported_state="running")) == {Breach.CHECKPOINT}


def told(step: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "step", "step": step["step"], "data": step}


def test_what_the_folder_says_of_the_job_counts(tmp_path: Path) -> None:
    job = JournalledJob()
    job.early = True
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
    assert decode(ScoredGroup, encode(group, MIN_ENTRY_BYTES), MIN_ENTRY_BYTES) == replace(group)


def history_of(folder: Path) -> Path:
    return folder / "history.jsonl"


def cut_to_two_lines(folder: Path) -> None:
    lines = history_of(folder).read_text().splitlines(keepends=True)
    history_of(folder).write_text("".join(lines[:2]))


def change_a_figure(folder: Path) -> None:
    lines = [json.loads(line) for line in history_of(folder).read_text().splitlines()]
    lines[1]["data"]["reward"] = 0.99
    history_of(folder).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def cut_off_the_last_line(folder: Path) -> None:
    lines = history_of(folder).read_text().splitlines(keepends=True)
    history_of(folder).write_text("".join(lines[:-1]))


def one_character(folder: Path) -> None:
    history_of(folder).write_text(history_of(folder).read_text().replace('"kind": "step"', '"kind": "stop"', 1))


@pytest.mark.parametrize(
    "spoil", [cut_to_two_lines, change_a_figure, one_character, lambda folder: history_of(folder).unlink()]
)
def test_a_history_that_was_cut_rewritten_or_taken_away_is_found_by_the_journal(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    assert audit_job(folder, reported_state="succeeded").violations == []
    spoil(folder)
    report = audit_job(folder, reported_state="succeeded")
    assert {(v.breach, v.where) for v in report.violations} >= {(Breach.HISTORY, "history.jsonl")}


def test_a_history_whose_last_line_was_cut_off_no_longer_tells_of_the_last_checkpoint(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    cut_off_the_last_line(folder)
    report = audit_job(folder, reported_state="succeeded")
    assert [(v.breach, v.where) for v in report.violations] == [(Breach.CHECKPOINT, "checkpoints/step-00000005")]


def test_a_history_of_an_earlier_release_that_lacks_steps_of_its_journal_was_cut(tmp_path: Path) -> None:
    job = JournalledJob()
    job.early = True
    folder = job.write(tmp_path / "job")
    (folder / JOB_FILE).write_text(json.dumps({"format": FORMAT, "state": "running"}))
    assert breaches(audit_job(folder)) == {Breach.HISTORY}, "it is not there"
    for number, violated in ((5, False), (4, False), (3, True)):
        history_of(folder).write_text("".join(f"{json.dumps(told(step))}\n" for step in job.history[:number]))
        assert bool(audit_job(folder).violations) is violated, (
            f"the newest of 5 may be under way, and {number} are told"
        )
    (folder / JOB_FILE).write_text(json.dumps({"format": FORMAT, "state": "succeeded"}))
    history_of(folder).write_text("".join(f"{json.dumps(told(step))}\n" for step in job.history[:4]))
    assert breaches(audit_job(folder)) == {Breach.HISTORY}, "none is under way"


def alter_a_verdict(folder: Path, key: JournalKey | None = None) -> None:
    """Writes the journal anew with one more right answer, every checksum right."""
    journal = Journal(folder / "journal")
    records = list(journal.records())
    group = decode(ScoredGroup, records[1].groups[0], MIN_ENTRY_BYTES)
    verdicts = tuple(replace(verdict, reward=1.0, accuracy=1.0) for verdict in group.verdicts)
    records[1] = replace(
        records[1], groups=(encode(replace(group, verdicts=verdicts), MIN_ENTRY_BYTES), *records[1].groups[1:])
    )
    shutil.rmtree(folder / "journal")
    again = Journal(folder / "journal", key)
    for record in records:
        again.append(record)


def test_verdicts_that_were_altered_under_new_checksums_are_found_by_the_history(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    alter_a_verdict(folder)
    report = audit_job(folder, reported_state="succeeded")
    assert [(v.breach, v.where) for v in report.violations] == [(Breach.HISTORY, "history.jsonl, step 2")]
    assert "record_digest" in report.violations[0].message


def test_a_checkpoint_with_other_weights_under_new_checksums_is_found_by_the_history(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    path = folder / "checkpoints" / "step-00000003"
    (path / "weights").write_bytes(b"\x09")
    manifest = json.loads((path / MANIFEST).read_text())
    files = [WrittenFile("weights", 1, digest_of_file(path / "weights"))]
    store = CheckpointStore(tmp_path / "forged", keep=1)
    (store.begin(3) / "weights").write_bytes(b"\x09")
    shutil.copy(store.commit(3, manifest["state"], files) / MANIFEST, path / MANIFEST)
    report = audit_job(folder, reported_state="succeeded")
    assert [(v.breach, v.where) for v in report.violations] == [(Breach.CHECKPOINT, "checkpoints/step-00000003")]
    assert "written anew" in report.violations[0].message


@pytest.mark.parametrize(
    "document",
    ["", "{", "[]", "{}", '{"format": 9, "state": "running"}', '{"format": 1, "state": "dancing"}', '{"format": 1, "state": 3}'],
)  # fmt: skip
def test_a_broken_job_record_is_a_violation(document: str, tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    (folder / JOB_FILE).write_text(document)
    report = audit_job(folder, reported_state="succeeded")
    assert [(v.breach, v.where) for v in report.violations] == [(Breach.DAMAGED, JOB_FILE)]


def test_any_flipped_byte_of_the_job_record_is_a_violation(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    JobFolder(folder).save({"incarnation": 1, "state": "succeeded", "step": STEPS, "cause": "none"}, str)
    assert audit_job(folder).violations == []
    data = (folder / JOB_FILE).read_bytes()
    own_name = data.index(b"xxh3")  # without it the file is one of an earlier release
    for position in {*range(len(data))} - {*range(own_name, own_name + 4)}:
        (folder / JOB_FILE).write_bytes(data[:position] + bytes([data[position] ^ 0x01]) + data[position + 1 :])
        if JobFolder(folder).fault() is not None:  # white space may be another white space
            assert Breach.DAMAGED in breaches(audit_job(folder)) if position % 40 == 0 else True
        else:
            assert json.loads((folder / JOB_FILE).read_bytes()) == json.loads(data)


@pytest.mark.parametrize("change", [{"step": 4}, {"groups": {"trained": 11}}, {"groups": {"issued": 20}}])
def test_a_job_that_succeeded_said_what_its_journal_says(change: dict[str, Any], tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    said = {"incarnation": 1, "state": "succeeded", "step": STEPS, "groups": {"trained": 10, "issued": 21}}
    JobFolder(folder).save(said, str)
    assert audit_job(folder).violations == []
    JobFolder(folder).save(said | change, str)
    assert [(v.breach, v.where) for v in audit_job(folder).violations] == [(Breach.HISTORY, JOB_FILE)]


def test_a_spec_that_is_not_what_a_checkpoint_was_made_of_is_found(tmp_path: Path) -> None:
    job = JournalledJob()
    identity = {"spec": make_spec(BATCH, BOUND).model_dump(mode="json")}
    del identity["spec"]["model"]["fp32_output_layer"], identity["spec"]["algorithm"]["revision"]
    job.identity = identity
    folder = job.write(tmp_path / "job")
    assert audit_job(folder, reported_state="succeeded").violations == [], "a setting that is newer than the checkpoint"
    (folder / "spec.yaml").write_text(dump_spec(make_spec(BATCH, BOUND + 5)))
    report = audit_job(folder, reported_state="succeeded")
    assert breaches(report) == {Breach.SPEC}
    assert "off_policy.max_off_policy_steps = 1, and spec.yaml says 6" in report.violations[0].message


def test_a_damaged_list_of_lineages_is_a_violation(tmp_path: Path) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    (folder / "lineage.json").write_text("{}")
    assert Breach.DAMAGED in breaches(audit_job(folder, reported_state="succeeded"))


def test_a_job_of_an_earlier_release_is_sound_and_what_cannot_be_proved_of_it_is_said(tmp_path: Path) -> None:
    job = JournalledJob()
    job.early = True
    report = audit_job(job.write(tmp_path / "job"), reported_steps=job.history, reported_state="succeeded")
    assert report.violations == []
    assert "history.jsonl: it is not there: nothing was compared with it" in report.remarks
    told = "\n".join(report.unproved)
    for part in ("`millrace replay` proves it", "have no MAC", "checkpoints/step-00000003", "figures of evaluations"):
        assert part in told


def test_what_was_told_of_batches_without_their_digests_is_said_to_be_unproved(tmp_path: Path) -> None:
    job = JournalledJob()
    job.early = True
    folder = job.write(tmp_path / "job")
    history_of(folder).write_text("".join(f"{json.dumps(told(step))}\n" for step in job.history))
    report = audit_job(folder, reported_state="succeeded")
    assert report.violations == []
    assert any("batches of 5 steps" in line for line in report.unproved)


class LiveJob:
    """A job that trains while it is audited: what the learner writes, in its order, as fast as it can."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "spec.yaml").write_text(dump_spec(make_spec(BATCH, BOUND)))
        JobFolder(folder).save({"incarnation": 1, "state": "running"}, str)
        self.stop = threading.Event()
        self.steps = 0

    def run(self) -> None:
        journal, ledger = Journal(self.folder / "journal"), Ledger()
        store, history = CheckpointStore(self.folder / "checkpoints", keep=2), JobFolder(self.folder)
        reader = HistoryReader(history_of(self.folder))
        while not self.stop.is_set():
            step = self.steps + 1
            ids = [ledger.issue(self.steps).group_id for _ in range(BATCH)]
            for group_id in ids:
                ledger.settle(group_id, Fate.TRAINED)
            groups = tuple(encode(group_of(group_id, self.steps), MIN_ENTRY_BYTES) for group_id in ids)
            settled = tuple(ledger.take_unwritten())
            record = BatchRecord(step, 1, groups, settled, ledger.issued, digest(self.steps), reader.mark())
            journal.append(record)
            line = {
                "step": step,
                "lineage": 1,
                "groups_trained": BATCH,
                "policy_age_max": 0,
                "weights_digest": digest(step),
            }
            history.append("step", step, line | {"record_digest": record.digest})
            self.steps = step
            if step % 3 == 0:
                (store.begin(step) / "weights").write_bytes(bytes(1000))
                files = [WrittenFile("weights", 1000, xxhash.xxh3_128_hexdigest(bytes(1000)))]
                state = {"lineage": 1, "ledger": ledger.state(), "start_step": 0}
                history.append("checkpoint", step, {"manifest": manifest_digest(step, state, files)})
                store.commit(step, state, files)


def test_a_job_that_trains_while_it_is_audited_has_no_violation(tmp_path: Path) -> None:
    job = LiveJob(tmp_path / "job")
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        audits = 0
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline or audits < 10:
            before = job.steps
            report = audit_job(job.folder)
            assert report.violations == []
            assert before <= report.steps <= job.steps + 1
            audits += 1
    finally:
        job.stop.set()
        thread.join()
    assert job.steps > 20, "it did train meanwhile"


def test_a_lineage_that_rises_while_a_folder_is_read_has_it_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JournalledJob().write(tmp_path / "job")
    read = evidence.verify_checkpoints

    def verify_checkpoints(path: Path) -> Any:
        monkeypatch.setattr(audit_files, "verify_checkpoints", read)
        raise_lineage(folder, read_rises(folder), 2, STEPS, "while it was read")
        return {}, {path / "checkpoints" / "step-00000005": "half of it"}

    monkeypatch.setattr(audit_files, "verify_checkpoints", verify_checkpoints)
    monkeypatch.setattr(audit_files, "SETTLE_S", 0.0)
    assert audit_job(folder, reported_state="running").violations == []


def a_key(tmp_path: Path, name: str, secret: bytes = b"a secret of 24 bytes ...") -> JournalKey:
    path = tmp_path / name
    path.write_bytes(secret)
    return JournalKey.read(path)


def test_with_the_key_every_record_is_proved_and_without_it_nothing_is_wrong(tmp_path: Path) -> None:
    job = JournalledJob()
    job.key = a_key(tmp_path, "key")
    folder = job.write(tmp_path / "job")
    proved = audit_job(folder, reported_state="succeeded", key=job.key)
    assert (proved.violations, proved.proved) == ([], STEPS + 1)
    assert not any("MAC" in line for line in proved.unproved)
    without = audit_job(folder, reported_state="succeeded")
    assert (without.violations, without.proved) == ([], 0)
    assert "6 records are sealed with a key: --key-file proves them" in without.unproved


def test_another_key_says_so_and_a_journal_without_macs_is_proved_by_none(tmp_path: Path) -> None:
    job = JournalledJob()
    job.key = a_key(tmp_path, "key")
    other = a_key(tmp_path, "other", b"another secret, as long")
    report = audit_job(job.write(tmp_path / "job"), reported_state="succeeded", key=other)
    assert breaches(report) == {Breach.SEAL}
    assert all("made with another key" in violation.message for violation in report.violations)
    plain = audit_job(JournalledJob().write(tmp_path / "plain"), reported_state="succeeded", job_id="job", key=other)
    assert [v.message for v in plain.violations] == ["no record has a MAC: the key that was given proves nothing here"]


def test_a_folder_that_was_written_anew_as_a_whole_is_found_with_the_key_alone(tmp_path: Path) -> None:
    job = JournalledJob()
    job.key = a_key(tmp_path, "key")
    forged = JournalledJob()
    forged.key = a_key(tmp_path, "forger", b"a key that somebody made up")
    forged.change_groups(2, lambda groups: [groups[0], encode(group_of(5, 0), MIN_ENTRY_BYTES)])
    report = audit_job(forged.write(tmp_path / "forged"), reported_state="succeeded", job_id="job", key=job.key)
    assert breaches(report) == {Breach.SEAL}
    folder = job.write(tmp_path / "job")
    alter_a_verdict(folder)  # the forger has no key at all
    assert Breach.SEAL in breaches(audit_job(folder, reported_state="succeeded", key=job.key))


def test_records_that_were_left_out_altered_or_lost_their_mac_are_found_with_the_key(tmp_path: Path) -> None:
    job = JournalledJob()
    job.key = a_key(tmp_path, "key")
    folder = job.write(tmp_path / "job")
    [segment] = (folder / "journal").glob("*.wal")
    whole = segment.read_bytes()

    def found(data: bytes) -> list[str]:
        segment.write_bytes(data)
        report = audit_job(folder, reported_state="succeeded", key=job.key)
        return [v.message for v in report.violations if v.breach is Breach.SEAL]

    offsets = [offset for offset, _, _ in _scan(segment, torn_tail_allowed=False)]
    pieces = [whole[a:b] for a, b in pairwise([*offsets, len(whole)])]
    assert found(b"".join(pieces)) == []
    fates_only = replace(job.records[-1], settled=())
    twin = Journal(tmp_path / "twin")
    twin.append(fates_only)
    [unsealed] = (tmp_path / "twin").glob("*.wal")
    assert found(b"".join(pieces[:5]) + unsealed.read_bytes()) == ["it has no MAC, and a record before it has one"]
    ahead = Journal(tmp_path / "ahead", job.key)
    ahead.append(fates_only)  # sealed by the very key, but not after these records
    [elsewhere] = (tmp_path / "ahead").glob("*.wal")
    assert (
        "its MAC is not of this record after the one before it"
        in found(b"".join(pieces[:5]) + elsewhere.read_bytes())[0]
    )
