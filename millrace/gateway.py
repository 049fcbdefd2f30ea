"""Gateway's HTTP API, path by path: what the command line and `Client` are built on. Answers are JSON objects as the gateway gives them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, Unpack
from urllib.parse import quote

import httpx

from millrace.records import JsonObject, SampleFilters
from services.common.errors import MillraceError

TIMEOUT_S = 60.0
"""More than the gateway needs to check a job's model and data."""
SILENCE_S = 60.0
"""Longest silence of a stream of events before the client closes it."""


class GatewayError(MillraceError):
    """The gateway refused a request, or does not answer; the message names the next action."""

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
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    def submit(self, spec: JsonObject, *, idempotency_key: str | None = None) -> JsonObject:
        """Queues a job and returns its record; the same idempotency key, the same job. GatewayError has a line per wrong field."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._request("POST", "/jobs", json=spec, headers=headers)

    def check(self, spec: JsonObject, *, response: str | None = None) -> JsonObject:
        """The result of a dry run, which queues nothing; `response`: judged for the first tasks. Raises as `submit`."""
        params = {"dry_run": "true"} | ({} if response is None else {"try_response": response})
        return self._request("POST", "/jobs", json=spec, params=params)

    def jobs(self, limit: int = 100, wanted: Mapping[str, str | Sequence[str]] | None = None) -> list[JsonObject]:
        """Jobs, newest first; `wanted`: the filters of `GET /jobs`."""
        return list(self._request("GET", "/jobs", params={"limit": limit, **(wanted or {})})["jobs"])

    def label(self, job_id: str, labels: JsonObject) -> JsonObject:
        """Sets a job's `tags` and `notes`, those that are given, and returns its record."""
        return self._request("PATCH", _path(job_id), json=labels)

    def job(self, job_id: str) -> JsonObject:
        """A job's record."""
        return self._request("GET", _path(job_id))

    def cancel(self, job_id: str) -> JsonObject:
        """Cancels a job and returns its record."""
        return self._request("POST", _path(job_id, "cancel"))

    def pause(self, job_id: str) -> JsonObject:
        """Pauses a job and returns its record."""
        return self._request("POST", _path(job_id, "pause"))

    def resume(self, job_id: str) -> JsonObject:
        """Resumes a paused job and returns its record."""
        return self._request("POST", _path(job_id, "resume"))

    def delete(self, job_id: str) -> None:
        """Deletes a job that has ended, with its folder. Raises GatewayError when another job uses its files."""
        self._exchange("DELETE", _path(job_id))

    def prune(self, limits: Mapping[str, float], *, dry_run: bool = False) -> JsonObject:
        """Deletes ended jobs beyond the limits (`keep`, `older_than_days`, `max_bytes`) and lists them; a dry run only lists them."""
        return self._request("POST", "/jobs/prune", params={**limits, "dry_run": str(dry_run).lower()})

    def dead_letters(self, job_id: str, stage: str | None, limit: int) -> JsonObject:
        """`letters`, newest first by stage, and `totals`."""
        params: dict[str, str | int] = {"limit": limit} | ({"stage": stage} if stage else {})
        return self._request("GET", _path(job_id, "dead-letters"), params=params)

    def dead_letter(self, job_id: str, stage: str, entry: str) -> JsonObject:
        """One dead letter with its payload."""
        return self._request("GET", _path(job_id, "dead-letters", stage, entry))

    def requeue(self, job_id: str, stage: str, entry: str) -> JsonObject:
        """Puts a dead letter back on its stream."""
        return self._request("POST", _path(job_id, "dead-letters", stage, entry, "requeue"))

    def steps(self, job_id: str, start: int = 1) -> list[JsonObject]:
        """Step records from step `start` on, oldest first, at most a thousand."""
        return list(self.history(job_id, start)["steps"])

    def all_steps(self, job_id: str) -> list[JsonObject]:
        """Every step record, oldest first, a thousand in a request."""
        steps: list[JsonObject] = []
        while page := self.steps(job_id, int(steps[-1]["step"]) + 1 if steps else 1):
            steps += page
        return steps

    def evals(self, job_id: str) -> list[JsonObject]:
        """The evaluations, oldest first."""
        return list(self.history(job_id)["evals"])

    def history(self, job_id: str, start: int = 1) -> JsonObject:
        """`steps` from step `start` on, and `evals`."""
        return self._request("GET", _path(job_id, "metrics"), params={"from": start})

    def rollouts(self, job_id: str, count: int = 10, **filters: Unpack[SampleFilters]) -> list[JsonObject]:
        """The newest judged groups, newest first; a filter that is None or False is none."""
        wanted = {name: value for name, value in filters.items() if value is not None and value is not False}
        params: dict[str, Any] = {"limit": count, **wanted}
        return list(self._request("GET", _path(job_id, "rollouts"), params=params)["samples"])

    def compare(self, job_ids: Sequence[str]) -> JsonObject:
        """`runs`, one for each job, and `differences`, the settings that are not equal in all of them."""
        return self._request("GET", "/jobs/compare", params={"job": list(job_ids)})

    def ledger(self, job_id: str, *, fate: str | None = None, offset: int = 0, limit: int = 100) -> JsonObject:
        """Counts of the job's groups by fate, and a page of the groups with this fate."""
        page: dict[str, str | int] = {"offset": offset, "limit": limit} | ({"fate": fate} if fate else {})
        return self._request("GET", _path(job_id, "ledger"), params=page)

    def workers(self) -> list[JsonObject]:
        """Workers whose heartbeat has not expired."""
        return list(self._request("GET", "/workers")["workers"])

    def events(self, job_id: str, *, after: str | None = None) -> Iterator[Event]:
        """The job's events after that with the id `after`, until the gateway ends the stream or is silent for `SILENCE_S`."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        with self._answering(), suppress(httpx.ReadTimeout):
            yield from self._stream("GET", _path(job_id, "events"), headers=headers)

    def chat(self, body: JsonObject) -> Generator[JsonObject, None, None]:
        """The chunks of a streamed answer (`POST /v1/chat/completions`) as they arrive. To stop the answer, close the iterator."""
        stream = self._stream("POST", "/v1/chat/completions", json=body | {"stream": True})
        with self._answering(), closing(stream) as events:
            for event in events:
                if "error" in event.data:
                    message = str(event.data["error"].get("message"))
                    raise GatewayError(message, status=httpx.codes.SERVICE_UNAVAILABLE)
                if "choices" in event.data:
                    yield event.data

    def _request(self, method: str, path: str, **options: Any) -> JsonObject:  # noqa: ANN401  httpx's own
        response = self._exchange(method, path, **options)
        try:
            answer: JsonObject = response.json()
        except ValueError as error:
            raise GatewayError(f"{self.url} answered something that is not JSON: is it a Millrace gateway?") from error
        return answer

    def _exchange(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401  httpx's own
        with self._answering():
            response = self._send(method, path, **options)
        if response.is_error:
            raise _refusal(response)
        return response

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401
        try:
            return self._http.request(method, path, **options)
        except httpx.RemoteProtocolError:  # the gateway may have closed an idle connection at that moment
            if method != "GET":
                raise
            return self._http.request(method, path, **options)

    def _stream(self, method: str, path: str, **options: Any) -> Generator[Event, None, None]:  # noqa: ANN401
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
        with self._http.stream(method, path, timeout=timeout, **options) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield from parse_events(response.iter_lines())

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raises GatewayError in place of httpx's errors."""
        try:
            yield
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            message = f"the gateway at {self.url} does not answer ({reason}): start it with `millrace up`"
            raise GatewayError(message) from error


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events from their lines. Comments are skipped; data that is not a JSON object becomes `{"text": …}`."""
    fields: dict[str, str] = {}
    last_id = ""
    for line in lines:
        if line:
            name, _, value = line.partition(":")  # of a comment, the name is empty
            value = value.removeprefix(" ")
            fields[name] = f"{fields['data']}\n{value}" if name == "data" and "data" in fields else value
            continue
        last_id = fields.get("id", last_id)
        if "data" in fields:
            yield Event(last_id, fields.get("event", "message"), _parse_object(fields["data"]))
        fields = {}


def _parse_object(text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except ValueError:
        return {"text": text}
    return value if isinstance(value, dict) else {"text": text}


def _path(job_id: str, *more: str) -> str:
    return "/".join(["/jobs", *(quote(part, safe="") for part in (job_id, *more))])


def _refusal(response: httpx.Response) -> GatewayError:
    """The gateway's error, a line for each wrong field, and the remedy."""
    try:
        error = response.json()["error"]
        lines = [
            str(error["message"]),
            *(f"  {item['field']}: {item['message']}" for item in error.get("fields") or []),
        ]
    except (ValueError, KeyError, TypeError):
        lines = [f"the gateway answered {response.status_code} {response.reason_phrase}"]
    if response.status_code == httpx.codes.UNAUTHORIZED:
        lines.append(
            "its token lies in `gateway.token` of the home where `millrace up` runs: name that with --home, "
            "or give the token as MILLRACE_TOKEN or MILLRACE_TOKEN_FILE"
        )
    if response.status_code == httpx.codes.NOT_FOUND:
        lines.append("`millrace jobs` lists the jobs there are")
    return GatewayError("\n".join(lines), status=response.status_code)
