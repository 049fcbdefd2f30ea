"""What must hold of a job after any fault, judged from its folder alone.

folder ─► audit: each ordinal has one fate, none is trained twice, ages within the bound, versions only grow, checkpoints agree
       └► journal ─► chain ─► weights of every version ─► each trained token was sampled by the version that its group names
          checkpoints ─► their weights are the chain's, on every rank
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.data.order import task_index
from services.common.errors import MillraceError
from services.common.jobs.folder import SPEC_FILE
from services.common.spec.job import JobSpec, parse_spec
from services.common.streams.codec import decode
from services.common.streams.limits import entry_limit
from services.common.streams.types import RolloutGroup, ScoredGroup
from services.learner.audit.files import audit_job
from services.learner.audit.report import AuditReport
from services.learner.groups.batch import assemble
from services.learner.groups.buffer import Judged
from services.learner.storage.checkpoints import verify_checkpoints
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import BatchRecord, Journal
from tests.chaos import played
from tests.chaos.job import ROWS
from tests.chaos.scripted import script
from tests.chaos.scripted.trainer import rank_file

MAX_VIOLATIONS = 20


@dataclass(slots=True)
class Finding:
    """What the job's folder says."""

    audit: AuditReport
    tokens: int = 0
    """Response tokens that were checked against the weights of the version that they name."""
    states: dict[int, bytes] = field(default_factory=lambda: {0: script.GENESIS})
    """Policy version → the state of its weights, as the journal's batches give it."""
    violations: list[str] = field(default_factory=list)

    def wrong(self, what: str) -> None:
        """Notes a violation."""
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(what)


def examine(folder: Path, *, ended: bool) -> Finding:
    """Looks at a job's folder, `<home>/jobs/<job>`; of a job that has ended every ordinal must have a fate."""
    spec = parse_spec((folder / SPEC_FILE).read_text())
    finding = Finding(audit_job(folder, reported_state="succeeded" if ended else "running"))
    for violation in finding.audit.violations:
        finding.wrong(f"{violation.breach} in {violation.where}: {violation.message}")
    saved = {step: states_of(checkpoint.path, spec) for step, checkpoint in verify_checkpoints(folder)[0].items()}
    try:
        for record in Journal(folder / JOURNAL_DIR).records():
            _take(record, spec, saved, finding)
    except MillraceError as error:
        finding.wrong(f"journal: {error}")
    for step, states in saved.items():
        if any(state != finding.states.get(step) for state in states):
            finding.wrong(f"checkpoint of step {step}: not what the journal's batches give")
    if ended and max(saved, default=None) != finding.audit.steps:
        finding.wrong(f"the job ended at step {finding.audit.steps}; its checkpoints are of {sorted(saved)}")
    return finding


def states_of(checkpoint: Path, spec: JobSpec) -> list[bytes]:
    """The state that each rank saved."""
    files = [checkpoint / rank_file(rank) for rank in range(spec.learner.world_size)]
    return [bytes.fromhex(json.loads(file.read_text())["state"]) for file in files]


def _take(record: BatchRecord, spec: JobSpec, saved: dict[int, list[bytes]], finding: Finding) -> None:
    if not record.groups:
        return
    limit = entry_limit(spec.rollout, spec.eval)
    groups = [Judged(decode(ScoredGroup, payload, limit), payload, None) for payload in record.groups]
    if record.step - 1 not in finding.states and record.step - 1 in saved:  # what was between is put aside as damaged
        finding.states[record.step - 1] = saved[record.step - 1][0]
    for judged in groups:
        for trouble in _troubles(judged, spec, finding):
            finding.wrong(f"step {record.step}, group {judged.group_id}: {trouble}")
    before = finding.states.get(record.step - 1)
    if before is None:
        finding.wrong(f"step {record.step}: nothing says which weights it began with")
        return
    finding.states[record.step] = script.advance(before, assemble(groups, spec))


def _troubles(judged: Judged, spec: JobSpec, finding: Finding) -> Iterator[str]:
    """What is wrong with a trained group: its prompt, its tokens or its verdicts."""
    group = judged.scored.group
    if group.task.environment is not None:
        finding.tokens += group.sampled_tokens

        def mark_of(version: int) -> bytes | None:
            state = finding.states.get(version)
            return None if state is None else script.fingerprint_of_state(state)

        yield from played.troubles(judged.scored, spec, mark_of)
        return
    row = script.row_of(group.prompt_tokens.tolist())
    if row != task_index(spec.data.seed, judged.group_id, ROWS, spec.data.shuffle):
        yield f"asks row {row}"
    yield from _wrong_tokens(group, row, finding)
    right = [script.is_right(row, rollout.tokens.tolist()) for rollout in group.rollouts]
    said = [verdict.accuracy for verdict in judged.scored.verdicts]
    if [None if value is None else bool(value) for value in said] != right:
        yield f"verdicts {said} for responses that are {right}"


def _wrong_tokens(group: RolloutGroup, row: int, finding: Finding) -> Iterator[str]:
    for index, rollout in enumerate(group.rollouts):
        ends = [*(span.start for span in rollout.versions[1:]), len(rollout.tokens)]
        for span, end in zip(rollout.versions, ends, strict=True):
            state = finding.states.get(span.policy_version)
            if state is None:
                yield f"sampled by version {span.policy_version}, whose weights nothing tells"
                return
            mark = script.fingerprint_of_state(state)
            for position in range(span.start, end):
                finding.tokens += 1
                if int(rollout.tokens[position]) != script.token(mark, row, index, position):
                    yield f"token {position} of rollout {index} is not of version {span.policy_version}'s weights"
                    return
