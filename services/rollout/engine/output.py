"""Output of the engine's processes, as lines of our own log: the root cause of their end is printed there and nowhere else.

begin ──► descriptors 1 and 2 are a pipe ──► the engine's processes start and inherit it ──► release: 1 and 2 are restored
              │
              └──► a thread logs each line in the context of the job that the engine serves; it keeps the newest ──► last_error

This process's own log goes to its old place all the time. The pipe ends with this process, however that ends.
"""

from __future__ import annotations

import contextvars
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TextIO

log = logging.getLogger(__name__)

_KEPT_LINES = 400
LINE_CHARS = 4096
RECENT_S = 60.0
"""An older line is not the cause of an end that is detected now."""
_SETTLE_TIMEOUT_S = 2.0
_REPEAT_INTERVAL_S = 600.0
"""The same warning is logged at most this often: the engine repeats some at every weight sync."""
_STANDARD = (1, 2)
_BLOCK_BYTES = 1 << 16
_PREFIX = re.compile(r"(?:\([^()]*\) *)?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ (?:\[[^\]]*\] )?)?")
"""`(EngineCore pid=17) ERROR 11-22 18:00:00 [core.py:708] `, in part or whole."""
_ERROR = re.compile(r"Fatal Python error: .|[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b: .")
_NUMBER = re.compile(r"\d+")
_NO_CAUSE = re.compile(r"root cause|EngineDeadError|engine core initialization failed", re.IGNORECASE)


class EngineOutput:
    """The output of one engine's processes, from their start to their end."""

    def __init__(self) -> None:
        """Lines are logged in the context of the caller, until `about` changes it."""
        self._lines: deque[tuple[float, str]] = deque(maxlen=_KEPT_LINES)
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._saved: dict[int, int] = {}
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO, TextIO]] = []
        self._pipe: tuple[int, int] | None = None
        self._marks: dict[str, threading.Event] = {}
        self._logged: dict[str, float] = {}
        """Kind of warning → when one was logged, the newest last."""

    def about(self) -> None:
        """Logs all later lines in the context of the caller: the engine serves another job now."""
        self._context = contextvars.copy_context()
        self._logged = {}

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Captures the output of the processes that are started within."""
        self._begin()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Restores this process's own output, if that is not done yet; the processes that were started keep the pipe."""
        with self._lock:
            for number, saved in self._saved.items():
                os.dup2(saved, number)
                os.close(saved)
            self._saved = {}
            for handler, stream, own in self._handlers:
                handler.setStream(stream)
                own.close()
            self._handlers = []

    def last_error(self) -> str:
        """The newest recent line that names an error, without its logger's prefix, or "". Blocks for up to `_SETTLE_TIMEOUT_S`."""
        self._settle()
        since = time.monotonic() - RECENT_S
        lines = [_split(line) for at, line in reversed(self._lines) if at >= since]
        lines = [(level, text) for level, text in lines if text and not _NO_CAUSE.search(text)]
        causes = [text for _, text in lines if _ERROR.match(text)]
        errors = [text for level, text in lines if level in {"ERROR", "CRITICAL"}]
        return next(iter(causes + errors), "")

    def close(self) -> None:
        """Reads the rest of the output of ended processes, and closes the pipe. Blocks for up to `_SETTLE_TIMEOUT_S`."""
        self.release()
        self._settle()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe[1])  # the thread ends at the end of the pipe: when no process has it open

    def _begin(self) -> None:
        resource_tracker.ensure_running()  # Python's own process, as long-lived as this one: it must not inherit the pipe
        read, write = os.pipe()
        self._pipe = (read, write)
        threading.Thread(target=self._read, args=(read,), name="engine output", daemon=True).start()
        with self._lock:
            self._saved = {number: os.dup(number) for number in _STANDARD}
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and (number := _descriptor(handler.stream)) in _STANDARD:
                    own = os.fdopen(os.dup(number), "w", buffering=1, errors="backslashreplace")
                    self._handlers.append((handler, handler.stream, own))
                    handler.setStream(own)
            for number in _STANDARD:
                os.dup2(write, number)

    def _settle(self) -> None:
        """Waits until the thread has read all that is in the pipe now, at most `_SETTLE_TIMEOUT_S`."""
        if self._pipe is None:
            return
        mark, reached = f"<{secrets.token_hex(16)}>", threading.Event()
        self._marks[mark] = reached
        os.write(self._pipe[1], f"\n{mark}\n".encode())  # after all that is in the pipe; the thread always reads
        reached.wait(_SETTLE_TIMEOUT_S)
        del self._marks[mark]

    def _read(self, descriptor: int) -> None:
        """Takes every line until the last process that prints has ended; runs in a thread of its own."""
        rest = b""
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while block := pipe.read(_BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._take(line)
                rest = rest[:LINE_CHARS]
        self._take(rest)

    def _take(self, raw: bytes) -> None:
        line = raw[:LINE_CHARS].decode(errors="replace").strip()
        reached = self._marks.get(line)
        if reached is not None:
            reached.set()
        elif line:
            self._lines.append((time.monotonic(), line))
            level, _ = _split(line)
            if level != "WARNING" or self._is_new(line):
                self._context.run(log.log, logging.getLevelNamesMapping()[level], "%s", line)

    def _is_new(self, line: str) -> bool:
        """Whether no warning that differs in numbers only was logged recently."""
        logged = self._logged  # `about` may replace the table meanwhile
        kind, now = _NUMBER.sub("0", line), time.monotonic()
        if now - logged.get(kind, -_REPEAT_INTERVAL_S) < _REPEAT_INTERVAL_S:
            return False
        logged.pop(kind, None)
        logged[kind] = now
        if len(logged) > _KEPT_LINES:
            del logged[next(iter(logged))]
        return True


def _split(line: str) -> tuple[str, str]:
    """Level of a line, INFO if it has none, and its text without the logger's prefix."""
    _, level, text = _PREFIX.split(line, maxsplit=1)  # it matches every line, perhaps only its empty beginning
    return level or "INFO", text.strip()


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
