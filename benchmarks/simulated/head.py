"""The learner's head in a process of its own: all of its loops and its weights' process are real, its ranks compute nothing.

    python -m benchmarks.simulated.head HOME REDIS_URL SPEC

Prints the job's id, then a line for each version: its number, and the monotonic time at which its file was written. Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import cast

import torch

from services.common.config.settings import Settings
from services.common.jobs.folder import SPEC_FILE
from services.common.jobs.store import JobStore
from services.common.redis.connection import connect
from services.common.service.logs import configure_logging
from services.common.service.process_tree import die_with_parent
from services.common.spec.job import JobSpec, dump_spec
from services.learner.controller import Head
from services.learner.ranks.client import Ranks
from tests.chaos.job import MODEL
from tests.chaos.scripted import script
from tests.integration.learner.scripted_ranks import ScriptedRanks


class ModelRanks(ScriptedRanks):
    """Ranks whose weights are those of the script's model, which servers can take."""

    async def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the version."""
        return {name: torch.from_numpy(array) for name, array in script.weights(self.state).items()}

    async def write_weights(self, path: Path, lineage: int, n: int) -> None:
        """Writes the version, and prints when."""
        await super().write_weights(path, lineage, n)
        print(n, time.monotonic(), flush=True)

    def fail(self, error: BaseException) -> None:
        """Ends the process."""
        print(f"the head died: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


async def submit(settings: Settings, spec: JobSpec) -> str:
    """The id of a new job, claimed as a learner's agent does it."""
    redis = connect(settings.redis_url)
    try:
        store = JobStore(redis)
        record = await store.create(spec)
        await store.claim("learner")
    finally:
        await redis.aclose()
    folder = settings.job_dir(record.id)
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(dump_spec(spec))
    return record.id


def main() -> None:
    """Runs the head until the input ends."""
    die_with_parent()
    configure_logging("learner", "WARNING")
    home, url, document = sys.argv[1:]
    settings = Settings(home=Path(home), REDIS_URL=url, worker="learner")  # type: ignore[call-arg]  # its alias
    spec = JobSpec.model_validate(json.loads(document))
    job_id = asyncio.run(submit(settings, spec))
    print(job_id, flush=True)
    ranks = cast("Ranks", ModelRanks())
    Head(job_id, spec, settings.models_dir / MODEL, settings, ranks).start()
    sys.stdin.read()
    os._exit(0)  # at once: the whole home is thrown away


if __name__ == "__main__":
    main()
