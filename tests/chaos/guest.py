"""One hostile job from submission to end, as its owner would see it: answered, ended, and told why, each within its limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from millrace.connection import find_token
from millrace.records import ENDED
from tests.chaos.grammar.cases import Case, Unrest
from tests.chaos.grammar.draft import Draft, Expected
from tests.chaos.stack import Stack

ANSWER_S = 60.0
"""Longest time that the answer to a request may take."""
END_S = 660.0
"""A job that was not refused has ended so long after a learner took it: one whose groups all fail may go on for ten minutes."""
MOST_S, QUIET_S = 1800.0, 120.0
"""One that says why it makes no step, and still issues groups, has so long: a slow source may take long to make 256 of them."""
QUEUE_S = 1800.0
"""Those before it take their time; then the learner hangs."""
CANCEL_S = 60.0
"""So long after it was asked to, a job has been cancelled."""
ENDLESS_S = 10.0
"""A job that would train for ever is cancelled after so much of it."""
BUSY_S = 60.0
"""For so long a job comes again while the gateway is busy with the checks of others."""
PAUSE_S = 2.0
TELLS_NOTHING = ("the ranks ended with exit code", "internal error", "See root cause above")
"""What a job's owner can do nothing with: as a cause it is none."""
LOOK_S = 0.25


class Stuck(Exception):  # noqa: N818  what the matter is
    """A job does not end, not even when it is cancelled: its learner takes no other."""


class Interrupted(Exception):  # noqa: N818  what the matter is
    """The stack was taken down for another job's sake: this one says nothing."""


@dataclass(slots=True)
class Stay:
    """What became of a hostile job."""

    case: Case
    end: str = ""
    """refused, or the state in which it ended, or deleted."""
    cause: str = ""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


def client_of(stack: Stack) -> httpx.Client:
    """A client of the stack's gateway that waits as long as a request may take."""
    headers = {"Authorization": f"Bearer {find_token(stack.state.token_file)}"}
    return httpx.Client(base_url=stack.state.url, headers=headers, timeout=ANSWER_S, trust_env=False)


class Guest:
    """A hostile job at the gateway."""

    def __init__(self, home: Path, client: httpx.Client, case: Case, halted: threading.Event) -> None:
        """Asks nothing yet.

        Args:
            home: of the stack.
            client: of its gateway (`client_of`); it is closed when the visit is over.
            case: what is submitted.
            halted: set when nothing more can be tried with this stack.
        """
        self.stay = Stay(case)
        self._case, self._halted = case, halted
        self._home, self._http = home, client
        self._issued, self._moved_s = 0, 0.0
        """Groups issued so far, and seconds from the job's being taken to the newest of them."""

    def visit(self) -> Stay:
        """Submits the job and waits for its end.

        Raises:
            Stuck: it has none.
            Interrupted: another job took the stack down.
        """
        began, draft = time.monotonic(), self._case.draft(self._home)
        try:
            with self._http:
                job_id = self._submit(draft)
                if job_id is not None:
                    self._see_out(job_id, draft)
        finally:
            self.stay.seconds = time.monotonic() - began
            draft.clear()
        return self.stay

    def _wrong(self, what: str) -> None:
        self.stay.violations.append(f"{self._case}: {what}")

    def _submit(self, draft: Draft) -> str | None:
        """The job's id, or None when it was refused."""
        body = draft.body if draft.body is not None else json.dumps(draft.spec).encode()
        headers = {"Content-Type": draft.media_type, "Idempotency-Key": f"hostile-{self._case.seed}"}
        response = self._ask("POST", "/jobs", content=body, headers=headers)
        until = time.monotonic() + BUSY_S
        while response is not None and "Retry-After" in response.headers and time.monotonic() < until:
            time.sleep(float(response.headers["Retry-After"]))  # others of its kind take all places
            response = self._ask("POST", "/jobs", content=body, headers=headers)
        if response is None:
            return None
        said = _message(response)
        if response.is_success:
            if draft.expected is Expected.REFUSED:
                self._wrong("was taken in, and should have been refused")
            if self._case.unrest is Unrest.SUBMIT_AGAIN:
                self._submit_again(body, headers, response)
            return str(response.json()["id"])
        self.stay.end, self.stay.cause = "refused", said
        if response.is_server_error:
            self._wrong(f"was answered {response.status_code}: {said[:200]}")
        elif draft.untrue and draft.untrue in said:
            self._wrong(f"was refused with what is not true: {said[:200]}")
        elif not said:
            self._wrong(f"was refused ({response.status_code}) without a reason")
        return None

    def _submit_again(self, body: bytes, headers: dict[str, str], first: httpx.Response) -> None:
        with ThreadPoolExecutor(4) as hands:
            again = list(hands.map(lambda _: self._ask("POST", "/jobs", content=body, headers=headers), range(4)))
        ids = {response.json().get("id") for response in again if response is not None and response.is_success}
        if ids - {first.json()["id"]}:
            self._wrong(f"one Idempotency-Key gave the jobs {sorted(map(str, ids))}")

    def _see_out(self, job_id: str, draft: Draft) -> None:
        """Meddles with the job, waits for its end, and judges that."""
        submitted, taken, asked, meddled = time.monotonic(), 0.0, 0.0, False
        while True:
            record, now = self._record(job_id), time.monotonic()
            if record is None:
                self.stay.end = "deleted"
                return
            if record["state"] in ENDED:
                self._judge(record, draft)
                return
            if not taken and record["state"] not in {"queued", "paused"}:
                taken = now
            if not meddled and self._case.unrest and now - submitted > self._case.unrest_s:
                asked = self._meddle(job_id, self._case.unrest) or asked
                meddled = True
            elif not asked and self._is_overdue(draft, record, now - submitted, now - taken if taken else 0.0):
                asked = self._cancel(job_id)
            if asked and now - asked > CANCEL_S:
                self._wrong(f"is {record['state']} {CANCEL_S:.0f} s after it was cancelled")
                raise Stuck(str(self._case))
            time.sleep(LOOK_S)

    def _is_overdue(self, draft: Draft, record: dict[str, Any], queued_s: float, taken_s: float) -> bool:
        """Whether the job should be cancelled now; one that ought to have ended by itself is a violation."""
        if draft.endless and taken_s > ENDLESS_S:
            return True
        if self._issued != (issued := record["groups"].get("issued", 0)):
            self._issued, self._moved_s = issued, taken_s
        moves = bool(record["cause"]) and taken_s - self._moved_s < QUIET_S
        if taken_s > (MOST_S if moves else END_S) or queued_s > QUEUE_S:
            said = {name: record[name] for name in ("state", "step", "cause", "groups")}
            self._wrong(f"has not ended {taken_s:.0f} s after a learner took it: {said}")
            return True
        return False

    def _judge(self, record: dict[str, Any], draft: Draft) -> None:
        self.stay.end, self.stay.cause = record["state"], record["cause"]
        if record["state"] == "succeeded":
            if draft.expected is Expected.ENDS:
                self._wrong("succeeded")
        elif not record["cause"].strip():
            self._wrong(f"ended {record['state']} without a cause")
        elif any(words in record["cause"] for words in TELLS_NOTHING):
            self._wrong(f"ended {record['state']} with a cause that tells nothing: {record['cause'][:200]}")

    def _meddle(self, job_id: str, unrest: Unrest) -> float:
        """Does it; when the job was asked to end, or 0."""
        match unrest:
            case Unrest.CANCEL:
                return self._cancel(job_id)
            case Unrest.CANCEL_TWICE:
                self._at_once(lambda: self._cancel(job_id), lambda: self._cancel(job_id))
                return time.monotonic()
            case Unrest.PAUSE:
                self._ask("POST", f"/jobs/{job_id}/pause")
                time.sleep(PAUSE_S)
                self._ask("POST", f"/jobs/{job_id}/resume")
            case Unrest.PAUSE_AND_CANCEL:
                self._at_once(lambda: self._ask("POST", f"/jobs/{job_id}/pause"), lambda: self._cancel(job_id))
                return time.monotonic()
            case Unrest.DELETE:
                self._ask("DELETE", f"/jobs/{job_id}")
            case Unrest.SUBMIT_AGAIN:
                pass
        return 0.0

    def _cancel(self, job_id: str) -> float:
        self._ask("POST", f"/jobs/{job_id}/cancel")
        return time.monotonic()

    def _at_once(self, *actions: Callable[[], object]) -> None:
        with ThreadPoolExecutor(len(actions)) as hands:
            for hand in [hands.submit(action) for action in actions]:
                hand.result()

    def _record(self, job_id: str) -> dict[str, Any] | None:
        """The job's record; None when there is none any more."""
        response = self._ask("GET", f"/jobs/{job_id}")
        if response is not None and response.is_success:
            return dict(response.json())
        if (
            response is not None
            and response.status_code == httpx.codes.NOT_FOUND
            and self._case.unrest is Unrest.DELETE
        ):
            return None
        said = "nothing" if response is None else f"{response.status_code} {_message(response)[:200]}"
        self._wrong(f"GET /jobs/{job_id} was answered {said}")
        raise Stuck(str(self._case))

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """The answer; None, and a violation, when there was none.

        Raises:
            Interrupted: another job took the stack down.
        """
        if self._halted.is_set():
            raise Interrupted
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            if self._halted.is_set():
                raise Interrupted from error
            self._wrong(f"{method} {path.partition('/hostile')[0]} had no answer: {type(error).__name__} {error}")
            return None


def _message(response: httpx.Response) -> str:
    """What an error says: its message, and the first wrong fields."""
    try:
        error = response.json()["error"]
        fields = "; ".join(f"{item['field']}: {item['message']}" for item in (error.get("fields") or [])[:3])
        return f"{error['message']} {fields}".strip()
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
