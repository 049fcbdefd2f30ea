"""A client of the gateway: plain HTTP, typed as far as people's tools need it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from services.common.errors import ConfigError, DeadlineExceeded, MillraceError

TIMEOUT_S = 60.0
"""Longer than the gateway takes to check a job's model and data."""
SILENCE_S = 60.0
"""Longest silence of an event stream before it is opened again."""
POLL_S = 1.0
PATIENCE_S = 60.0
"""How long a follower bears a gateway that does not answer."""
ENDED = frozenset({"succeeded", "failed", "cancelled"})

JsonObject = dict[str, Any]


class GatewayError(MillraceError):
    """The gateway refused a request, or does not answer; the message says what to do next."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        """`status` is the HTTP status, or None when there was no answer."""
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.status is None or self.status in {429, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event of a job."""

    id: str
    kind: str
    data: JsonObject


class GatewayClient:
    """One gateway, one token. Use it as a context manager."""

    def __init__(self, url: str, token: str | None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Connects when first asked."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes its connections."""
        self._http.close()

    def submit(self, spec: JsonObject, *, idempotency_key: str | None = None) -> JsonObject:
        """Queues a job; answers its record. With a key of your own, repeating the call gives the same job.

        Raises:
            GatewayError: the spec is wrong (one line per field), or no answer.
        """
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._ask("POST", "/jobs", json=spec, headers=headers)

    def jobs(self, limit: int = 100) -> list[JsonObject]:
        """Jobs, newest first."""
        return list(self._ask("GET", "/jobs", params={"limit": limit})["jobs"])

    def job(self, job_id: str) -> JsonObject:
        """A job's record."""
        return self._ask("GET", _path(job_id))

    def cancel(self, job_id: str) -> JsonObject:
        """Cancels a job; answers its record."""
        return self._ask("POST", _path(job_id, "cancel"))

    def pause(self, job_id: str) -> JsonObject:
        """Pauses a job; answers its record."""
        return self._ask("POST", _path(job_id, "pause"))

    def resume(self, job_id: str) -> JsonObject:
        """Resumes a paused job; answers its record."""
        return self._ask("POST", _path(job_id, "resume"))

    def delete(self, job_id: str) -> None:
        """Deletes a job that has ended, with its folder.

        Raises:
            GatewayError: there is no such job, it has not ended, or another begins with it; or no answer.
        """
        self._answer("DELETE", _path(job_id))

    def prune(self, limits: Mapping[str, float], *, dry_run: bool = False) -> JsonObject:
        """Deletes ended jobs beyond the limits (`keep`, `older_than_days`, `max_bytes`); tells which, or which would go."""
        return self._ask("POST", "/jobs/prune", params={**limits, "dry_run": str(dry_run).lower()})

    def dead_letters(self, job_id: str, stage: str | None, limit: int) -> JsonObject:
        """`letters`, newest first by stage, and `totals`."""
        params: dict[str, str | int] = {"limit": limit} | ({"stage": stage} if stage else {})
        return self._ask("GET", _path(job_id, "dead-letters"), params=params)

    def dead_letter(self, job_id: str, stage: str, entry: str) -> JsonObject:
        """One dead letter with its payload."""
        return self._ask("GET", _path(job_id, "dead-letters", quote(stage, safe=""), quote(entry, safe="")))

    def requeue(self, job_id: str, stage: str, entry: str) -> JsonObject:
        """Puts a dead letter back on its stream."""
        return self._ask("POST", _path(job_id, "dead-letters", quote(stage, safe=""), quote(entry, safe=""), "requeue"))

    def steps(self, job_id: str, start: int = 1) -> list[JsonObject]:
        """Step records from step `start` on, oldest first, at most a thousand."""
        return list(self.history(job_id, start)["steps"])

    def evals(self, job_id: str) -> list[JsonObject]:
        """The evaluations, oldest first."""
        return list(self.history(job_id)["evals"])

    def history(self, job_id: str, start: int = 1) -> JsonObject:
        """`steps` from step `start` on, and `evals`."""
        return self._ask("GET", _path(job_id, "metrics"), params={"from": start})

    def rollouts(self, job_id: str, count: int = 10) -> list[JsonObject]:
        """The newest judged groups, newest first."""
        return list(self._ask("GET", _path(job_id, "rollouts"), params={"limit": count})["samples"])

    def ledger(self, job_id: str, *, fate: str | None = None, offset: int = 0, limit: int = 100) -> JsonObject:
        """Sums of the job's groups by fate, and a page of those with this fate."""
        page: dict[str, str | int] = {"offset": offset, "limit": limit} | ({"fate": fate} if fate else {})
        return self._ask("GET", _path(job_id, "ledger"), params=page)

    def workers(self) -> list[JsonObject]:
        """Workers whose heartbeat is fresh."""
        return list(self._ask("GET", "/workers")["workers"])

    def ready(self) -> bool:
        """Whether the gateway takes requests."""
        try:
            return self._http.get("/readyz").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def follow(
        self,
        job_id: str,
        start: int = 1,
        *,
        timeout_s: float | None = None,
        seen: Callable[[JsonObject], None] = lambda _: None,
    ) -> Iterator[JsonObject]:
        """Step records as they come, from step `start` on, until the job has ended. Bears a gateway that is away for a minute.

        Args:
            job_id: the job.
            start: first step.
            timeout_s: None waits for the end however long it takes.
            seen: told the job's record at every look.

        Raises:
            DeadlineExceeded: the job had not ended after `timeout_s` seconds.
            GatewayError: there is no such job, or the gateway stayed away.
        """
        begun = answered = time.monotonic()
        while True:
            try:
                record = self.job(job_id)  # asked first: no step comes after the end
                state = record["state"]
                seen(record)
                steps = self.steps(job_id, start)
                answered = time.monotonic()
            except GatewayError as error:
                if not error.passing or time.monotonic() - answered > PATIENCE_S:
                    raise
                state, steps = "", []
            yield from steps
            start = max([start, *(int(step["step"]) + 1 for step in steps)])
            if state in ENDED and not steps:
                return
            if timeout_s is not None and time.monotonic() - begun > timeout_s:
                raise DeadlineExceeded(f"job {job_id} is {state or 'unknown'} after {timeout_s:.0f} s")
            if not steps:
                time.sleep(POLL_S)

    def events(self, job_id: str, *, after: str | None = None) -> Iterator[Event]:
        """The job's events as they come (server-sent), until the gateway ends the stream or is silent for a minute.

        Args:
            job_id: the job.
            after: id of the last event seen; None begins with the first.

        Raises:
            GatewayError: there is no such job, or the connection broke.
        """
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
        try:
            with self._http.stream("GET", _path(job_id, "events"), headers=headers, timeout=timeout) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield from parse_events(response.iter_lines())
        except httpx.ReadTimeout:
            return
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def chat(self, body: JsonObject) -> Generator[JsonObject, None, None]:
        """The chunks of a streamed answer (`POST /v1/chat/completions`), as they come; closing the iterator ends the answer.

        Raises:
            GatewayError: refused, or broken off.
        """
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
        try:
            with self._http.stream(
                "POST", "/v1/chat/completions", json=body | {"stream": True}, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for event in parse_events(response.iter_lines()):
                    if "error" in event.data:
                        raise GatewayError(
                            str(event.data["error"].get("message")), status=httpx.codes.SERVICE_UNAVAILABLE
                        )
                    if "choices" in event.data:
                        yield event.data
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401  httpx's own
        try:
            response = self._send(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        return response

    def _ask(self, method: str, path: str, **options: Any) -> JsonObject:  # noqa: ANN401  httpx's own
        response = self._answer(method, path, **options)
        try:
            answer: JsonObject = response.json()
        except ValueError as error:
            raise GatewayError(f"{self.url} answered something that is not JSON: is it a Millrace gateway?") from error
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401
        """Sends a request; a read is sent once more when the gateway closed its idle connection at that very moment."""
        try:
            return self._http.request(method, path, **options)
        except httpx.RemoteProtocolError:
            if method != "GET":
                raise
            return self._http.request(method, path, **options)

    def _unreachable(self, error: httpx.HTTPError) -> GatewayError:
        reason = str(error) or type(error).__name__
        return GatewayError(f"the gateway at {self.url} does not answer ({reason}): start it with `millrace up`")


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events from their lines; comments are skipped, data that is no JSON object is wrapped as `{"text": …}`."""
    fields: dict[str, str] = {}
    last_id = ""
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields['data']}\n{value}" if name == "data" and "data" in fields else value
            continue
        last_id = fields.get("id", last_id)
        if "data" in fields:
            yield Event(last_id, fields.get("event", "message"), _object(fields["data"]))
        fields = {}


def _object(text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except ValueError:
        return {"text": text}
    return value if isinstance(value, dict) else {"text": text}


def _path(job_id: str, *more: str) -> str:
    return "/".join(["/jobs", quote(job_id, safe=""), *more])


def _refusal(response: httpx.Response) -> GatewayError:
    """The gateway's error, its wrong fields a line each, and what to do about it."""
    try:
        body = response.json()
        error = body["error"]
        lines = [
            str(error["message"]),
            *(f"  {item['field']}: {item['message']}" for item in error.get("fields") or []),
        ]
    except (ValueError, KeyError, TypeError):
        lines = [f"the gateway answered {response.status_code} {response.reason_phrase}"]
    status = response.status_code
    if status == httpx.codes.UNAUTHORIZED:
        lines.append(
            "its token lies in `gateway.token` of the home where `millrace up` runs: name that with --home, "
            "or give the token as MILLRACE_TOKEN or MILLRACE_TOKEN_FILE"
        )
    if status == httpx.codes.NOT_FOUND:
        lines.append("`millrace jobs` lists the jobs there are")
    return GatewayError("\n".join(lines), status=status)


def find_token(state_file: str | None) -> str | None:
    """MILLRACE_TOKEN, else the file that MILLRACE_TOKEN_FILE names, else the running stack's; None when there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if token := os.environ.get("MILLRACE_TOKEN"):
        return token.strip()
    name = os.environ.get("MILLRACE_TOKEN_FILE") or state_file
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"the token file {name} cannot be read: {error.strerror}") from error
