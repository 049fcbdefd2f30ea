"""Client: one gateway, for programs and notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from millrace.chat import ChatAnswer, Messages
from millrace.connection import find_gateway
from millrace.document import Overrides, Spec, make_document, sweep
from millrace.frames import comparison_frame
from millrace.gateway import TIMEOUT_S, GatewayClient
from millrace.job import Job, JobLike, id_of
from millrace.records import JobState, JsonObject

if TYPE_CHECKING:
    import pandas as pd


class Client:
    """One gateway, one token. Use it as a context manager, or close it; threads may share it.

    Every method raises GatewayError where the gateway refuses it or does not answer, and ConfigError where a spec cannot be read.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Without `url` and `home`: the gateway that MILLRACE_URL names, or that of the stack that `millrace up` started in MILLRACE_HOME.

        The token is that stack's, or MILLRACE_TOKEN, or what MILLRACE_TOKEN_FILE holds. Raises ConfigError where no stack runs there.
        """
        address = find_gateway(url, token, home)
        self.gateway = GatewayClient(address.url, address.token, timeout_s=timeout_s)
        """The HTTP API path by path, for what has no method here: workers, dead letters, the ledger."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections; its jobs cannot be used any more."""
        self.gateway.close()

    def submit(self, spec: Spec, overrides: Overrides | None = None, tags: Sequence[str] = ()) -> Job:
        """Queues a job: settings, or the path of their YAML or JSON file, with the overrides set ({"learner.lr": 1e-6}) and the tags added.

        A GatewayError over a spec has a line for each wrong field.
        """
        return Job(self.gateway, self.gateway.submit(make_document(spec, overrides, tags)))

    def sweep(
        self,
        spec: Spec,
        choices: Mapping[str, Sequence[Any]],
        overrides: Overrides | None = None,
        tags: Sequence[str] = (),
    ) -> list[Job]:
        """Queues a job for each combination of values ({"learner.lr": [1e-6, 3e-6]}), all with one tag more, `sweep:<name>-<random>`."""
        documents = sweep(make_document(spec, overrides, tags), choices)
        return [Job(self.gateway, self.gateway.submit(document)) for document in documents]

    def check(self, spec: Spec, overrides: Overrides | None = None, *, response: str | None = None) -> JsonObject:
        """The result of a dry run, which queues nothing; `response` is judged for the first tasks. Raises as `submit`."""
        return self.gateway.check(make_document(spec, overrides), response=response)

    def job(self, job: str) -> Job:
        """The job with this id, or with the only id that begins so."""
        return Job(self.gateway, self.gateway.job(job))

    def jobs(
        self,
        *,
        tags: Sequence[str] = (),
        state: JobState | None = None,
        name: str | None = None,
        search: str | None = None,
        sort: str | None = None,
        limit: int = 100,
    ) -> list[Job]:
        """Jobs, at most `limit` (500): with all these tags, in this state, with `name` in their id.

        `search`: words in id, tags, notes, model or data. `sort`: `reward`, `best_score`, `run_time`, … most first; None: newest first.
        """
        filters: dict[str, Any] = {"tag": list(tags), "state": state, "name": name, "search": search, "sort": sort}
        found = self.gateway.jobs(limit, {key: value for key, value in filters.items() if value})
        return [Job(self.gateway, record) for record in found]

    def compare(self, jobs: Sequence[JobLike]) -> pd.DataFrame:
        """One row for each of at most 50 jobs, by id: state, step, last reward, best held-out accuracy, then each setting that differs."""
        return comparison_frame(self.gateway.compare([id_of(job) for job in jobs]))

    def chat(
        self,
        messages: Messages,
        *,
        model: JobLike,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
    ) -> str:
        """The answer of a job's policy to a text or a conversation; that of a job that has ended is its exported checkpoint."""
        with self.stream_chat(
            messages, model=model, max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop
        ) as answer:
            return answer.read()

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: JobLike,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
    ) -> ChatAnswer:
        """The same answer as it arrives, with the policy version that sampled it."""
        name = self.job(model).id if isinstance(model, str) else model.id
        said = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(each) for each in messages]
        )
        body: JsonObject = {"model": name, "messages": said, "temperature": temperature, "top_p": top_p}
        body |= {} if max_tokens is None else {"max_tokens": max_tokens}
        body |= {"stop": [stop] if isinstance(stop, str) else list(stop)} if stop else {}
        return ChatAnswer(self.gateway.chat(body))
