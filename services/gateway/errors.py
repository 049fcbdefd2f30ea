"""Error answers: always `{"error": {"code", "message", "fields"?}}`, never a secret, never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from services.common.errors import (
    ConfigError,
    HubError,
    JobConflict,
    KeyReused,
    LetterRefused,
    MillraceError,
    Problem,
    SandboxError,
)
from services.common.redis.pool import PoolBusyError
from services.gateway.schemas import ErrorAnswer

log = logging.getLogger(__name__)

IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header that names a submission, so that its repeats are known."""
MAX_PROBLEMS = 100
"""Wrong fields that one answer lists."""
MAX_TEXT = 1000
"""Characters of a field's name or message that an answer repeats."""
RETRY_AFTER_S = 2
"""In every answer with 429 or 503."""
EVERYWHERE = (400, 401, 421, 429, 503)
"""Statuses with which the layers before a route refuse a request."""

CODES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "body_too_large",
    415: "unsupported_media_type",
    421: "misdirected",
    422: "invalid_request",
    429: "too_many",
    500: "internal",
    503: "unavailable",
    504: "timeout",
}
_RETRY_AFTER = {"headers": {"Retry-After": {"schema": {"type": "integer"}}}}
_AUTHENTICATE = {"headers": {"WWW-Authenticate": {"schema": {"type": "string"}}}}
_DOCUMENTED_HEADERS: dict[int, dict[str, Any]] = {401: _AUTHENTICATE, 429: _RETRY_AFTER, 503: _RETRY_AFTER}


class AdmissionBusy(MillraceError):  # noqa: N818
    """Too many submissions are being checked; answered with 503."""


class SpecRefused(ConfigError):  # noqa: N818
    """A request whose fields are wrong: a problem for each; answered with 422."""


def error_answer(
    status: int, message: str, *, problems: Sequence[Problem] | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error as JSON; 429 and 503 invite the client to try again."""
    error: dict[str, Any] = {"code": CODES.get(status, "error"), "message": message}
    if problems is not None:
        error["fields"] = [
            {"field": clipped(problem.field), "message": clipped(problem.message)}
            for problem in problems[:MAX_PROBLEMS]
        ]
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in {429, 503} else {}
    return JSONResponse({"error": error}, status_code=status, headers={**retry, **(headers or {})})


def busy() -> JSONResponse:
    """503: the gateway itself has no capacity left; Redis may be well."""
    return error_answer(503, "the gateway is busy: it is asked for more than it can answer; try again")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for its OpenAPI."""
    return {
        status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase, **_DOCUMENTED_HEADERS.get(status, {})}
        for status in sorted({*statuses, *EVERYWHERE})
    }


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    if error.status_code == 405 or (error.status_code == 404 and is_for_other_methods(request)):
        # Of every route of the path: the framework names the methods of the first one only.
        allowed = ", ".join(sorted({method for route in _routes(request) for method in route.methods or ()}))
        return error_answer(405, f"{request.method} is not for this path", headers={"Allow": allowed})
    message = "there is nothing here" if error.detail == "Not Found" else error.detail
    return error_answer(error.status_code, message, headers=error.headers)


def is_for_other_methods(request: Request) -> bool:
    """Whether the exact path has routes (`/jobs/schema`), but the request matched only a pattern (`/jobs/{job_id}`)."""
    methods = {method for route in _routes(request) if route.path == request.url.path for method in route.methods or ()}
    return bool(methods) and request.method not in methods


def _routes(request: Request) -> list[Any]:
    """Every route that matches the path; only those of the exact path, if it has any."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return [route for route in found if route.path == request.url.path] or found


async def validation_answer(_: Request, error: RequestValidationError) -> JSONResponse:
    """422 with every wrong parameter."""
    problems = []
    for item in error.errors():
        _, *path = item["loc"]
        problems.append(Problem(".".join(str(part) for part in path) or "body", item["msg"]))
    return error_answer(422, "the request is not valid", problems=problems)


async def _refused(_: Request, error: SpecRefused) -> JSONResponse:
    count = len(error.problems)
    more = f" (the first {MAX_PROBLEMS} of {count} problems)" if count > MAX_PROBLEMS else ""
    return error_answer(422, f"the request is not valid{more}", problems=error.problems)


async def _key_reused(request: Request, error: KeyReused) -> JSONResponse:
    return await _refused(request, SpecRefused(str(error), field=IDEMPOTENCY_KEY))


async def _conflict(_: Request, error: Exception) -> JSONResponse:
    return error_answer(409, str(error))


async def _redis(_: Request, error: Exception) -> JSONResponse:
    log.error("Redis failed: %s", type(error).__name__)
    return error_answer(503, "the job store does not answer; try again")


async def _hub(_: Request, error: Exception) -> JSONResponse:
    return error_answer(503, str(error))


async def _admission_busy(_: Request, error: Exception) -> JSONResponse:
    return error_answer(503, str(error))


async def _sandbox(_: Request, error: Exception) -> JSONResponse:
    log.error("a job could not be checked: %s", error)
    return error_answer(503, "this gateway cannot check jobs at the moment; try again")


async def _pool_busy(_: Request, __: Exception) -> JSONResponse:
    log.warning("no connection to Redis was free in time: more is asked of the gateway than it can answer")
    return busy()


async def _unexpected(_: Request, __: Exception) -> JSONResponse:
    return error_answer(500, "an internal error; the gateway's log has it")


Handlers = dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]]

HANDLERS: Handlers = {
    HTTPException: _http,
    RequestValidationError: validation_answer,
    SpecRefused: _refused,
    KeyReused: _key_reused,
    JobConflict: _conflict,
    LetterRefused: _conflict,
    RedisError: _redis,
    AdmissionBusy: _admission_busy,
    HubError: _hub,
    SandboxError: _sandbox,
    PoolBusyError: _pool_busy,
    Exception: _unexpected,
}
"""Handlers of every exception that a route can raise."""


def clipped(text: str) -> str:
    """Text of a client as an answer repeats it: at most MAX_TEXT characters, and valid Unicode."""
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return shown.encode(errors="replace").decode()
