"""How errors become answers: always `{"error": {"code", "message", "fields"?}}`, never a secret, never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from services.common.errors import ConfigError, JobConflict, LetterRefused, MillraceError, Problem, SandboxError
from services.common.redis.pool import PoolBusyError
from services.gateway.schemas import ErrorAnswer

log = logging.getLogger(__name__)

MAX_PROBLEMS = 100
"""Wrong fields that one answer lists."""
MAX_TEXT = 1000
"""Characters of a field's name or message that an answer repeats."""
RETRY_AFTER_S = 2
EVERYWHERE = (400, 401, 421, 429, 503)
"""Statuses by which the layers before a route refuse."""

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


class AdmissionBusy(MillraceError):  # noqa: N818  what it is
    """Too many submissions are being checked; answered with 503."""


class SpecRefused(ConfigError):  # noqa: N818  a refusal, as people say
    """A request whose fields are wrong: a problem for each; answered with 422."""


def error_answer(
    status: int,
    message: str,
    *,
    problems: Sequence[Problem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error as JSON."""
    error: dict[str, Any] = {"code": CODES.get(status, "error"), "message": message}
    if problems is not None:
        error["fields"] = [
            {"field": _fit(problem.field), "message": _fit(problem.message)} for problem in problems[:MAX_PROBLEMS]
        ]
    return JSONResponse({"error": error}, status_code=status, headers=dict(headers or {}))


def unavailable(message: str) -> JSONResponse:
    """503: worth another try."""
    return error_answer(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def too_many(message: str) -> JSONResponse:
    """429: one of the gateway's limits is reached."""
    return error_answer(429, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def busy() -> JSONResponse:
    """503: the gateway's own doing, not that of Redis."""
    return unavailable("the gateway is busy: it is asked for more than it can answer; try again")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for its OpenAPI."""
    return {
        status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase, **_documented_headers(status)}
        for status in sorted({*statuses, *EVERYWHERE})
    }


def install_handlers(app: FastAPI) -> None:
    """Registers a handler for everything that a route can raise."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(SpecRefused, _refused)
    app.add_exception_handler(JobConflict, _conflict)
    app.add_exception_handler(LetterRefused, _conflict)
    app.add_exception_handler(RedisError, _redis)
    app.add_exception_handler(AdmissionBusy, _queue_full)
    app.add_exception_handler(SandboxError, _no_child)
    app.add_exception_handler(PoolBusyError, _busy)
    app.add_exception_handler(Exception, _unexpected)


async def _http(request: Request, error: Exception) -> JSONResponse:
    problem = cast("HTTPException", error)
    if problem.status_code == 405 or (problem.status_code == 404 and _is_for_other_methods(request)):
        return error_answer(405, f"{request.method} is not for this path", headers={"Allow": _allowed(request)})
    message = "there is nothing here" if problem.detail == "Not Found" else problem.detail
    return error_answer(problem.status_code, message, headers=problem.headers)


def _is_for_other_methods(request: Request) -> bool:
    """Whether just this path has routes (`/jobs/schema`), and the request came to one of a pattern (`/jobs/{job_id}`)."""
    methods = {method for route in _routes(request) if route.path == request.url.path for method in route.methods or ()}
    return bool(methods) and request.method not in methods


def _routes(request: Request) -> list[Any]:
    """Every route of the path; those of just this path, if it has any."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return [route for route in found if route.path == request.url.path] or found


def _allowed(request: Request) -> str:
    """The methods of every route of the path; the framework names those of the first only."""
    routes = _routes(request)
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


async def _validation(_: Request, error: Exception) -> JSONResponse:
    problems = []
    for item in cast("RequestValidationError", error).errors():
        _, *path = item["loc"]
        problems.append(Problem(".".join(str(part) for part in path) or "body", item["msg"]))
    return error_answer(422, "the request is not valid", problems=problems)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    problems = cast("SpecRefused", error).problems
    more = f" (the first {MAX_PROBLEMS} of {len(problems)} problems)" if len(problems) > MAX_PROBLEMS else ""
    return error_answer(422, f"the request is not valid{more}", problems=problems)


async def _conflict(_: Request, error: Exception) -> JSONResponse:
    return error_answer(409, str(error))


async def _redis(_: Request, error: Exception) -> JSONResponse:
    log.error("Redis failed: %s", type(error).__name__)
    return unavailable("the job store does not answer; try again")


async def _queue_full(_: Request, error: Exception) -> JSONResponse:
    return unavailable(str(error))


async def _no_child(_: Request, error: Exception) -> JSONResponse:
    log.error("a job could not be checked: %s", error)
    return unavailable("this gateway cannot check jobs at the moment; try again")


async def _busy(_: Request, __: Exception) -> JSONResponse:
    log.warning("no connection to Redis was free in time: more is asked of the gateway than it can answer")
    return busy()


async def _unexpected(_: Request, __: Exception) -> JSONResponse:
    return error_answer(500, "an internal error; the gateway's log has it")


def _documented_headers(status: int) -> dict[str, Any]:
    names = {401: ("WWW-Authenticate", "string"), 429: ("Retry-After", "integer"), 503: ("Retry-After", "integer")}
    if status not in names:
        return {}
    name, kind = names[status]
    return {"headers": {name: {"schema": {"type": kind}}}}


def _fit(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return shown.encode(errors="replace").decode()
