"""A job's folder that a release without environments and turns wrote: audited, replayed and assembled as it was, to the bit."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgpack
import pytest
import yaml

from services.common.config.settings import Settings
from services.common.jobs.fates import Fate
from services.common.jobs.folder import SPEC_FILE
from services.common.spec.choices import TurnCredit
from services.common.spec.job import JobSpec, parse_recorded_spec
from services.common.streams.codec import decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.audit.files import audit_job
from services.learner.groups.batch import Batch
from services.learner.replay.plan import make_plan
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal
from tests.unit.common.models.test_directory import make_model
from tests.unit.learner.old_folder import RECORDED, as_before_turns

STEPS = 7
SEQUENCES = "93329c41379ae323aa4f72f200baddb83f88076ea07cac0b13f902cdb5c48c58"
"""Digest of the sequences of all steps, as that release made them of the journal."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy, as the journal is opened for writing elsewhere."""
    return Path(shutil.copytree(RECORDED, tmp_path / "jobs" / RECORDED.name))


@pytest.fixture
def spec(folder: Path) -> JobSpec:
    return parse_recorded_spec((folder / SPEC_FILE).read_text())


def payloads(folder: Path) -> list[bytes]:
    return [payload for record in Journal(folder / JOURNAL_DIR).records() for payload in record.groups]


def test_it_knows_nothing_of_environments_and_turns(folder: Path) -> None:
    document = yaml.safe_load((folder / SPEC_FILE).read_text())
    assert "environment" not in document
    assert "turn_credit" not in document["algorithm"]
    for payload in payloads(folder):
        group = msgpack.unpackb(payload)["group"]
        assert "environment" not in group["task"]
        assert all(rollout.keys().isdisjoint({"turns", "outcome"}) for rollout in group["rollouts"])


def test_it_has_no_violation(folder: Path) -> None:
    report = audit_job(folder, reported_state="succeeded")
    assert report.violations == []
    assert (report.steps, report.fates) == (STEPS, {Fate.TRAINED: 14, Fate.DEGENERATE: 4})


def test_its_groups_are_read_as_they_were_and_written_with_the_same_bytes(folder: Path) -> None:
    for payload in payloads(folder):
        scored = decode(ScoredGroup, payload, MIN_ENTRY_BYTES)
        assert encode(scored, MIN_ENTRY_BYTES) == payload
        assert scored.group.task.environment is None
        for rollout in scored.group.rollouts:
            assert (rollout.turns, rollout.outcome) == ((), None)
            assert rollout.sampled.all()
            assert rollout.sampled_tokens == len(rollout.tokens)


def test_its_sequences_are_those_that_were_trained(folder: Path, spec: JobSpec) -> None:
    assert (spec.environment, spec.algorithm.turn_credit) == (None, TurnCredit.TRAJECTORY)
    found = hashlib.sha256()
    for record in Journal(folder / JOURNAL_DIR).records():
        for sequence in Batch.of_payloads(record.groups, spec).sequences:
            for array in (sequence.tokens, sequence.inference_logprobs, sequence.advantage, sequence.loss_mask):
                found.update(array.tobytes())
            found.update(f"{sequence.prompt_len} {sequence.group_id} {sequence.reward}".encode())
    assert found.hexdigest() == SEQUENCES


def test_all_its_steps_can_be_replayed(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "tiny")
    plan = make_plan(folder, Settings(home=tmp_path), 0, None)
    assert (plan.start, plan.last, sorted(plan.digests)) == (0, STEPS, list(range(STEPS + 1)))


def test_a_folder_of_today_is_rewritten_to_the_very_fields_of_that_release(folder: Path, spec: JobSpec) -> None:
    """Of which other tests make use."""
    before = (folder / SPEC_FILE).read_text()
    (folder / SPEC_FILE).write_text(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
    assert (folder / SPEC_FILE).read_text() != before
    as_before_turns(folder)
    assert yaml.safe_load((folder / SPEC_FILE).read_text()) == yaml.safe_load(before)
