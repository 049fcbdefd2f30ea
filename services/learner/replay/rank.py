"""Rank of a replay: `python -m services.learner.replay.rank PASS_FILE`, started by torchelastic.

journal ─► assemble ─► train ─► digest, and the state compared with a checkpoint ─► results.jsonl (rank 0)

There is no head and no network: every rank reads the same journal and runs the same steps, in lockstep with the others.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.config.settings import load_settings
from services.common.errors import ConfigError
from services.common.models.roles import RoleModels
from services.common.service.logs import configure_logging
from services.common.service.process_tree import die_with_parent, end_process
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec
from services.learner.replay.plan import RESULTS, Pass
from services.learner.storage.folder import ERROR_FILE, JOURNAL_DIR
from services.learner.storage.journal import Journal

if TYPE_CHECKING:
    import torch

    from services.learner.training.stats import StepStats
    from services.learner.training.trainer import Trainer

log = logging.getLogger(__name__)


class Replayer:
    """This rank's share of a pass."""

    def __init__(self, task: Pass, trainer: Trainer, spec: JobSpec) -> None:
        """Loads the pass's initial state; ConfigError if that is not of the pass's initial version."""
        self._task, self._trainer, self._spec = task, trainer, spec
        self._work = Path(task.work)
        self._leads = trainer.pools.leads
        if task.load is not None:
            trainer.load(Path(task.load))
        if trainer.step != task.start:
            raise ConfigError(f"{task.load}: is of step {trainer.step}, not of step {task.start}")

    def run(self) -> None:
        """Runs every step of the pass."""
        from services.learner.groups.batch import Batch

        before = self._report_version(self._task.start, None)
        self._keep_state(self._task.start)
        after = before
        for record in Journal(Path(self._task.folder) / JOURNAL_DIR).records(after_step=self._task.start):
            if record.step > self._task.last:
                break
            if not record.groups:
                continue
            stats = self._trainer.train(Batch.of_payloads(record.groups, self._spec).sequences)
            after = self._report_version(record.step, stats)
            self._compare(record.step)
            self._keep_state(record.step)
        if self._leads and before is not None and after is not None:
            self._finish(before, after)

    def _report_version(self, step: int, stats: StepStats | None) -> dict[str, torch.Tensor] | None:
        """Reports the digest of the weights as they are published, and returns them, on rank 0."""
        from services.learner.training.tensor_file import make_snapshot

        weights = self._trainer.export()
        if weights is not None:
            digest = make_snapshot(1, step, weights).digest.hex()
            self._report(kind="version", step=step, digest=digest, stats=stats.as_record() if stats else None)
        return weights

    def _compare(self, step: int) -> None:
        from services.learner.replay.compare import differing
        from services.learner.training.rank_file import rank_file

        checkpoint = self._task.checkpoints.get(str(step))
        if checkpoint is None:
            return
        ours = self._save(f"compare-{step}")
        pools = self._trainer.pools
        name = rank_file(self._trainer.layout.rank, pools.name)
        found = pools.gathered(differing(ours / name, Path(checkpoint) / name))
        if self._leads:
            tensors = sum(count for count, _ in found)
            names = [f"rank {rank}: {wrong}" for rank, (_, names) in enumerate(found) for wrong in names]
            self._report(kind="checkpoint", step=step, path=checkpoint, tensors=tensors, different=names)
            shutil.rmtree(ours)

    def _keep_state(self, step: int) -> None:
        if step == self._task.keep_state_at:
            self._save("state")

    def _save(self, name: str) -> Path:
        """Writes every rank's state into a directory of the pass; on return it is complete."""
        from services.learner.training.background import files_of

        folder = self._work / name
        self._trainer.save(folder)
        try:
            files_of(self._trainer.saved(wait=True) or [])
        except OSError as error:
            what = f"{error.strerror}: name another directory with TMPDIR"
            raise OSError(error.errno, what, str(folder)) from error
        return folder

    def _finish(self, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import load_file, save_file

        from services.learner.replay.compare import distances

        if self._task.keep_weights:
            save_file(after, self._work / "after.safetensors")
        if self._task.compare_with is not None:
            recorded = load_file(Path(self._task.compare_with) / "after.safetensors")
            self._report(kind="distance", **distances(before, recorded, after))

    def _report(self, **result: Any) -> None:  # noqa: ANN401  JSON values
        with (self._work / RESULTS).open("a") as file:
            file.write(json.dumps(result) + "\n")


def main() -> None:
    """Entry point of a rank; writes an error into the pass's directory."""
    die_with_parent(signal.SIGKILL)
    task, settings = Pass.read(Path(sys.argv[1])), load_settings()
    configure_logging("replay", settings.log_level)
    try:
        spec = JobSpec.model_validate(task.spec, context=RECORDED)
        from services.learner.ranks.loop import build_trainer
        from services.learner.training.rendezvous import leave_process_group

        Replayer(task, build_trainer(spec, RoleModels.of(spec, settings), settings.platform), spec).run()
        leave_process_group()
    except Exception as error:
        log.exception("the replay failed")
        (Path(task.work) / ERROR_FILE).write_text(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}")
        end_process(1)
    end_process(0)


if __name__ == "__main__":
    main()
