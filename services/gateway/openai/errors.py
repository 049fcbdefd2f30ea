"""Errors below /v1 in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`, whichever layer refuses."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import MillraceError
from services.gateway.errors import EVERYWHERE, Handlers, clipped, validation_answer
from services.gateway.schemas import Answer

PREFIX = "/v1/"
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


class OpenAIErrorDetail(Answer):
    """What went wrong."""

    message: str = Field(description="A sentence for people.")
    type: str = Field(description="Whose fault it is.", examples=["invalid_request_error", "server_error"])
    param: str | None = Field(description="The parameter that is to blame, where one is.", examples=["messages"])
    code: str | None = Field(description="A stable word for programs.", examples=["model_not_found"])


class OpenAIErrorAnswer(Answer):
    """The body of every answer below /v1 that is not a success."""

    error: OpenAIErrorDetail


class OpenAIError(MillraceError):
    """A request below /v1 that is refused, or an answer that broke off."""

    retryable = False
    """Whether another rollout server may accept the request."""

    def __init__(
        self, status: int, message: str, code: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON values."""
        return error_body(self.status, str(self), self.code, self.param)


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    detail = OpenAIErrorDetail(message=clipped(message), type=kind, param=clipped(param) if param else None, code=code)
    return OpenAIErrorAnswer(error=detail).model_dump()


def openai_documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for its OpenAPI."""
    return {
        status: {"model": OpenAIErrorAnswer, "description": HTTPStatus(status).phrase}
        for status in sorted({*statuses, *EVERYWHERE})
    }


class OpenAIForm:
    """Translates refusals of the other layers (no token, too large a body, no such path) to OpenAI's format, below /v1 only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        started: Message | None = None
        body = b""

        async def translate(message: Message) -> None:
            nonlocal started, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                started = message
                return
            if started is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                translated = _translated(started["status"], body)
                headers = [header for header in started["headers"] if header[0].lower() != b"content-length"]
                await send({**started, "headers": [*headers, (b"content-length", str(len(translated)).encode())]})
                await send({**message, "body": translated})

        await self._app(scope, receive, translate)


async def _answer(_: Request, error: OpenAIError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
    """Below /v1, 400 with the first wrong parameter; elsewhere the gateway's own answer."""
    if request.scope["path"].startswith(PREFIX):
        return await _answer(request, _refusal(error))
    return await validation_answer(request, error)


OPENAI_HANDLERS: Handlers = {OpenAIError: _answer, RequestValidationError: _validation}


def _translated(status: int, body: bytes) -> bytes:
    """The body in OpenAI's format; unchanged when it has that format already, or is no error of the gateway."""
    try:
        error = json.loads(body)["error"]
        if "type" in error:
            return body
        message, code = str(error["message"]), _CODES.get(status, error["code"])
    except (ValueError, KeyError, TypeError):
        return body
    return json.dumps(error_body(status, message, code)).encode()


def _refusal(error: RequestValidationError) -> OpenAIError:
    """The first wrong parameter."""
    first = error.errors()[0]
    param = _path(first["loc"][1:]) if first["type"] != "json_invalid" else None
    if first["type"] == "extra_forbidden":
        return OpenAIError(400, f"{param}: there is no such parameter", "unknown_parameter", param=param)
    if first["type"] == "unsupported_parameter":
        return OpenAIError(400, f"{param}: {first['msg']}", "unsupported_parameter", param=param)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return OpenAIError(400, f"{param}: {first['msg']}" if param else first["msg"], code, param=param)


def _path(parts: tuple[int | str, ...]) -> str | None:
    """`messages[0].content`; without the names that pydantic gives to the alternatives of a union."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in {"str", "TextPart"} and not part.startswith(("list[", "constrained-", "function-")):
            path += f".{part}" if path else part
    return path or None
