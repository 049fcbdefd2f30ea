"""What people do to a stack all day: train, chat, watch, submit rightly and wrongly, and delete. Each does one thing, again and again."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from examples.demo.charlm_tokenizer import QUESTION
from millrace.connection import find_token
from millrace.gateway import GatewayClient, GatewayError
from millrace.records import ENDED
from services.common.service.stack_state import UpState

DEMO = Path(__file__).parents[2] / "deploy" / "config" / "jobs" / "demo.yaml"
STREAMS = 8
"""Event streams at a time."""
STREAM_S = 20.0
"""Each is closed after so long at the latest, and opened again."""
KEPT_JOBS = 3
"""Ended jobs that are not deleted."""
_REFUSED: tuple[dict[str, Any], ...] = (
    {"nope": 1}, {"model": {"path": "nowhere"}}, {"learner": {"steps": -1}}, {"data": {"train": {"source": "gone.jsonl"}}},
    {"name": "X" * 100}, {"reward": {"verifiers": {"*": "nobody"}}},
)  # fmt: skip


class Load:
    """Everybody at once. Use it as a context manager."""

    def __init__(self, state: UpState, model: Path, seed: int) -> None:
        """Does nothing yet; trains the demo's job on the model."""
        self.did: Counter[str] = Counter()
        """How often what was done; `… without an answer` where it was not answered as it should be."""
        self._state, self._model = state, model
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._job: str | None = None
        workers: list[Callable[[GatewayClient], None]] = [
            self._train,
            self._chat,
            self._submit,
            self._refuse,
            self._read,
            self._tidy,
        ]
        self._threads = [
            threading.Thread(target=self._repeat, args=(worker,), daemon=True)
            for worker in [*workers, *itertools.repeat(self._watch, STREAMS)]
        ]

    def __enter__(self) -> Self:
        """Begins."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; jobs are left as they are."""
        self._over.set()
        for thread in self._threads:
            thread.join(30.0)

    def _repeat(self, work: Callable[[GatewayClient], None]) -> None:
        what = work.__name__.strip("_")
        with GatewayClient(self._state.url, find_token(self._state.token_file)) as client:
            while not self._over.is_set():
                try:
                    work(client)
                    self.did[what] += 1
                except (GatewayError, httpx.HTTPError):
                    self.did[f"{what} without an answer"] += 1
                    self._over.wait(1.0)

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = yaml.safe_load(DEMO.read_text())
        spec["model"]["path"] = str(self._model)
        return spec

    def _train(self, client: GatewayClient) -> None:
        """The demo's job, from submission to end."""
        self._job = str(client.submit(self._spec())["id"])
        while not self._over.wait(1.0):
            if client.job(self._job)["state"] in ENDED:
                break

    def _tidy(self, client: GatewayClient) -> None:
        """Deletes all ended jobs but the newest, where the gateway can."""
        self._over.wait(10.0)
        old = [job["id"] for job in client.jobs(500) if job["state"] in ENDED][KEPT_JOBS:]
        for job_id in old:
            if self._delete(job_id):
                self.did["delete"] += 1

    def _delete(self, job_id: str) -> bool:
        """False where the gateway cannot."""
        token = find_token(self._state.token_file)
        response = httpx.delete(
            f"{self._state.url}/jobs/{job_id}", headers={"Authorization": f"Bearer {token}"}, timeout=60.0
        )
        return response.is_success

    def _chat(self, client: GatewayClient) -> None:
        """One streamed answer of the job's policy; sometimes broken off."""
        self._over.wait(self._random.uniform(1.0, 4.0))
        if self._job is None or client.job(self._job)["state"] != "running":
            return
        question = (
            f"{QUESTION}{self._random.randint(0, 9)} + {self._random.randint(0, 9)} + {self._random.randint(0, 9)} ="
        )
        body = {"model": self._job, "messages": [{"role": "user", "content": question}], "max_tokens": 8}
        with contextlib.closing(client.chat(body)) as chunks:
            for _ in itertools.islice(chunks, self._random.choice((1, 100))):
                pass

    def _watch(self, client: GatewayClient) -> None:
        """One event stream, read for a while."""
        if self._job is None:
            self._over.wait(0.5)
            return
        until = time.monotonic() + self._random.uniform(1.0, STREAM_S)
        for _ in client.events(self._job):  # what is not read to its end is closed
            if time.monotonic() > until or self._over.is_set():
                break
        self._over.wait(0.5)

    def _submit(self, client: GatewayClient) -> None:
        """A good job that is cancelled before its turn comes."""
        self._over.wait(self._random.uniform(3.0, 8.0))
        job_id = client.submit(self._spec() | {"name": "waits"})["id"]
        if self._random.random() < 0.5:
            client.pause(job_id)
        client.cancel(job_id)

    def _refuse(self, client: GatewayClient) -> None:
        """A job that is refused."""
        self._over.wait(self._random.uniform(0.5, 3.0))
        try:
            client.submit(self._spec() | self._random.choice(_REFUSED))
        except GatewayError as error:
            if error.passing:
                raise

    def _read(self, client: GatewayClient) -> None:
        """What the console asks for."""
        self._over.wait(1.0)
        client.jobs()
        client.workers()
        if self._job is not None:
            client.job(self._job)
            client.history(self._job)
            client.rollouts(self._job)
            client.ledger(self._job)
