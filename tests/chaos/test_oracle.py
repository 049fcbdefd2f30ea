"""The oracle finds what is wrong: each test writes a job's folder with one thing that must not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from services.common.jobs.fates import Fate
from services.common.streams.types import ScoredGroup, VersionSpan
from services.learner.groups.ledger import Settled
from tests.chaos.oracle import examine
from tests.chaos.written import GROUPS, Writer


def violations(writer: Writer, *, ended: bool = False) -> str:
    return "\n".join(examine(writer.folder, ended=ended).violations)


def with_rollout(group: ScoredGroup, **changes: object) -> ScoredGroup:
    first, *others = group.group.rollouts
    changed = replace(first, **changes)  # type: ignore[arg-type]
    return replace(group, group=replace(group.group, rollouts=(changed, *others)))


def written(folder: Path) -> Writer:
    """Eight sound steps, saved."""
    writer = Writer(folder / "job")
    writer.steps(8)
    return writer


def fresh(writer: Writer) -> list[ScoredGroup]:
    """The groups of one more step."""
    ids = range(writer.issued, writer.issued + GROUPS)
    writer.issued += GROUPS
    return [writer.group(group_id) for group_id in ids]


def test_a_sound_job_has_no_violation_and_all_its_tokens_were_checked(tmp_path: Path) -> None:
    finding = examine(written(tmp_path).folder, ended=True)
    assert not finding.violations
    assert finding.tokens == 8 * GROUPS * 2 * 4
    assert finding.audit.fates[Fate.TRAINED] == 8 * GROUPS


def test_a_group_trained_twice_is_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    groups = fresh(writer)
    writer.train(groups)
    writer.train([writer.group(groups[0].group.task.group_id)])
    assert "trained_twice" in violations(writer)


def test_an_ordinal_without_a_fate_is_found_once_the_job_has_ended(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.train(fresh(writer)[1:])
    assert not violations(writer)
    assert "no_fate" in violations(writer, ended=True)


def test_two_fates_of_one_group_are_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    groups = fresh(writer)
    writer.train(
        groups[:3],
        [*(Settled(group.group.task.group_id, Fate.TRAINED) for group in groups[:3]), Settled(0, Fate.STALE)],
    )
    assert "two_fates" in violations(writer)


def test_a_token_that_other_weights_sampled_is_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    first, *others = fresh(writer)
    tokens = first.group.rollouts[0].tokens.copy()
    tokens[1] = ord("0") + (tokens[1] - ord("0") + 1) % 10
    writer.train([with_rollout(first, token_ids=tokens.tobytes()), *others])
    assert "token 1 of rollout 0 is not of version 8's weights" in violations(writer)


def test_a_label_of_another_version_is_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    first, *others = fresh(writer)
    task = replace(first.group.task, min_policy_version=7)
    mislabelled = replace(first, group=replace(first.group, task=task))
    writer.train([with_rollout(mislabelled, versions=(VersionSpan(0, 7),)), *others])
    assert "is not of version 7's weights" in violations(writer)


def test_a_verdict_that_no_verifier_would_give_is_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    first, *others = fresh(writer)
    verdict = first.verdicts[0]
    wrong = 1.0 - float(verdict.accuracy or 0.0)
    writer.train(
        [replace(first, verdicts=(replace(verdict, accuracy=wrong, reward=wrong), *first.verdicts[1:])), *others]
    )
    assert "verdicts" in violations(writer)


def test_a_prompt_of_another_row_is_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    first, *others = fresh(writer)
    prompt = np.array(list(b"row 4999"), "<i4").tobytes()
    writer.train([replace(first, group=replace(first.group, prompt_token_ids=prompt)), *others])
    assert "asks row 4999" in violations(writer)


def test_weights_that_are_not_what_the_batches_give_are_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    groups = fresh(writer)
    writer.train(groups)
    writer.state = bytes(16)
    writer.save()
    assert "checkpoint of step 9: not what the journal's batches give" in violations(writer)


def test_an_ended_job_without_a_checkpoint_of_its_last_step_is_found(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.train(fresh(writer))
    assert "the job ended at step 9" in violations(writer, ended=True)
