"""One live stack for all end-to-end tests: embedded Redis, gateway, reward, learner and rollout, as `millrace up` starts them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.connection import find_token
from millrace.gateway import GatewayClient, GatewayError
from services.cli.up import detach, run_down
from services.common.service.stack_state import UpState, read_state

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".millrace" / "models"
MODEL = MODELS / "tiny-200"
"""The demo's small model after 200 of its 1,000 steps of warm start: good enough to learn from, and made in a fifth of the time."""
EXPERTS = MODELS / "tiny-moe-200"
"""The same with experts."""
_MAKE_MODEL = """
import sys
from pathlib import Path
from examples.demo.charlm_recipe import TinyRecipe
from examples.demo.models import make_tiny
sizes = {"architecture": "qwen3_moe", "experts": 4} if sys.argv[2:] == ["experts"] else {}
make_tiny(Path(sys.argv[1]), TinyRecipe(steps=200, demonstrations=25_600, **sizes))
"""


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    home: Path
    state: UpState
    client: GatewayClient

    def pid(self, name: str) -> int:
        """The present process of a service."""
        state = read_state(self.home)
        assert state is not None
        return state.processes[name].pid

    def wait(self, job_id: str, *, until: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        """Waits until the job's record is as wanted; fails with its state and logs."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                record = self.client.job(job_id)
            except GatewayError as error:
                if not (error.passing or error.status == 404) or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)  # Redis is away, or was emptied a moment ago
                continue
            if until(record):
                return record
            if time.monotonic() > deadline or record["state"] in {"failed", "cancelled"}:
                pytest.fail(
                    f"job {job_id} is {record['state']} ({record['cause']}) at step {record['step']}\n{self.tail()}"
                )
            time.sleep(0.5)

    def wait_for_jobs(self, job_ids: list[str], *, timeout_s: float) -> list[dict[str, Any]]:
        """Waits until the gateway knows these jobs; what it knows then, newest first."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.client.jobs()) < len(job_ids) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def tail(self) -> str:
        """The ends of the logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.home / "logs").glob("*.log"))
        )


def make_model(path: Path, *what: str) -> None:
    """Makes a model, unless it is there."""
    subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(path), *what], cwd=ROOT, check=True, timeout=600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack, with the model's directory among its own."""
    make_model(MODEL)
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@contextmanager
def running_stack(home: Path) -> Iterator[Stack]:
    """A stack that has the models of the demos."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_MODEL_ROOTS", f'["{MODELS}"]')
        patch.delenv("REDIS_URL", raising=False)
        state = detach(home, ["--port", "0"], print)
        try:
            with GatewayClient(state.url, find_token(state.token_file)) as client:
                yield Stack(home, state, client)
        finally:
            run_down(home, print)


@pytest.fixture
def demo_spec() -> dict[str, Any]:
    """The demo's job, cut down to a test's length."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "deploy/config/jobs/demo.yaml").read_text())
    spec["model"]["path"] = str(MODEL)
    spec["learner"]["steps"] = 36
    spec["checkpoint"]["interval_steps"] = 10
    spec["eval"]["tasks"] = 64
    return spec
