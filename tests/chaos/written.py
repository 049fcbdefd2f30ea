"""A job's folder as a learner would have left it, made in this process by the learner's own journal and checkpoint code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.checkpoints.manifest import CHECKPOINTS_DIR
from services.common.jobs.fates import Fate
from services.common.jobs.folder import SPEC_FILE
from services.common.spec.job import JobSpec, dump_spec
from services.common.streams.codec import encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from services.learner.groups.batch import assemble
from services.learner.groups.buffer import Judged
from services.learner.groups.ledger import Settled
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import BatchRecord, Journal
from tests.chaos.job import job_spec
from tests.chaos.scripted import script
from tests.chaos.scripted.trainer import rank_file, write_file

GROUPS = 4
"""Of one step."""
EVERY = 4
"""Steps between checkpoints."""


@dataclass
class Writer:
    """Trains step after step, on paper. What a test wants wrong it changes between two steps."""

    folder: Path
    step: int = 0
    state: bytes = script.GENESIS
    issued: int = 0

    def __post_init__(self) -> None:
        """Writes the spec."""
        self.folder.mkdir(parents=True)
        self.spec = JobSpec.model_validate(job_spec(steps=1000))
        (self.folder / SPEC_FILE).write_text(dump_spec(self.spec))
        self.journal = Journal(self.folder / JOURNAL_DIR)
        self.checkpoints = CheckpointStore(self.folder / CHECKPOINTS_DIR, keep=100)

    def steps(self, count: int) -> None:
        """Trains fresh groups, and saves every EVERY steps."""
        for _ in range(count):
            ids = range(self.issued, self.issued + GROUPS)
            self.issued += GROUPS
            self.train([self.group(group_id) for group_id in ids])
            if self.step % EVERY == 0:
                self.save()

    def group(self, group_id: int) -> ScoredGroup:
        """A group of this ordinal, sampled by the present weights and judged rightly."""
        return judged(self.folder.name, group_id, self.state, self.step)

    def train(self, groups: Sequence[ScoredGroup], settled: Sequence[Settled] | None = None) -> None:
        """Journals and trains one batch."""
        payloads = [encode(group, MIN_ENTRY_BYTES) for group in groups]
        fates = (
            settled if settled is not None else [Settled(group.group.task.group_id, Fate.TRAINED) for group in groups]
        )
        self.journal.append(BatchRecord(self.step + 1, 1, tuple(payloads), tuple(fates), self.issued))
        batch = [Judged(group, payload, None) for group, payload in zip(groups, payloads, strict=True)]
        self.state = script.advance(self.state, assemble(batch, self.spec))
        self.step += 1

    def save(self) -> None:
        """A checkpoint of the step."""
        path = self.checkpoints.begin(self.step)
        document = {"step": self.step, "state": self.state.hex(), "ballast": os.urandom(512).hex()}
        file = write_file(path / rank_file(0), document)
        ledger = {
            "issued": self.issued, "frontier": self.issued, "beyond": [], "counts": {"trained": self.issued}, "unwritten": [],
        }  # fmt: skip
        self.checkpoints.commit(self.step, {"lineage": 1, "ledger": ledger, "start_step": 0}, [file])


def judged(job_id: str, group_id: int, state: bytes, version: int, rollouts: int = 2) -> ScoredGroup:
    """A group as rollout and reward services would have made it with these weights."""
    task = Task(
        job_id=job_id, lineage=1, group_id=group_id, attempt=1, purpose=Purpose.TRAIN,
        prompt=(Message("user", script.prompt(group_id)),), data_source=script.DATA_SOURCE, ground_truth=script.answer(group_id),
        extra_info={}, group_size=rollouts, temperature=1.0, max_tokens=script.TOKENS, min_policy_version=version, timeout_s=60.0,
    )  # fmt: skip
    mark, responses, verdicts = script.fingerprint_of_state(state), [], []
    for index in range(rollouts):
        tokens = [script.token(mark, group_id, index, position) for position in range(script.TOKENS)]
        logprobs = np.array([script.logprob(token) for token in tokens], "<f4").tobytes()
        token_ids = np.array(tokens, "<i4").tobytes()
        responses.append(Rollout(token_ids, logprobs, "", FinishReason.STOP, (VersionSpan(0, version),)))
        score = float(script.is_right(group_id, tokens))
        verdicts.append(Verdict(VerdictStatus.SCORED, score, score, "gsm8k"))
    prompt = np.array(script.encode(task.prompt), "<i4").tobytes()
    return ScoredGroup(RolloutGroup(task, "rollout-0", prompt, tuple(responses), 0.1), tuple(verdicts), 0.1)
