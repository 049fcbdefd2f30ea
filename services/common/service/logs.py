"""Logs: one JSON object a line on stderr, with the job and group that the line is about."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_context: ContextVar[dict[str, str | int]] = ContextVar("log_context", default={})  # noqa: B039  never mutated, only replaced


@contextmanager
def log_context(**fields: str | int) -> Iterator[None]:
    """Adds fields (`job_id`, `group_id`, `step`, …) to every line logged within."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, context."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, object] = {
            "at": at, "level": record.levelname, "service": self._service, "logger": record.name, **_context.get(),
            "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(service: str, level: str = "INFO") -> None:
    """Makes this process log as JSON on stderr; libraries that report every step of their work do so at DEBUG only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpx2"):  # they log addresses, whose queries may hold signatures
        logging.getLogger(name).setLevel(logging.WARNING)
    if level.upper() != "DEBUG":
        for name in ("megatron", "vllm"):
            logging.getLogger(name).setLevel(logging.WARNING)
