"""What the engine's processes print, as lines of our own log: the root cause of their end stands there and nowhere else.

begin ──► descriptors 1 and 2 are a pipe ──► the engine's processes start, and inherit it ──► release: they are what they were
              │
              └──► a thread: each line is logged as of the job that the engine serves; the newest are kept ──► last_error

This process's own log goes where it went all the while. The pipe ends with this process, however that ends.
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

KEPT_LINES = 400
LINE_CHARS = 4096
RECENT_S = 60.0
"""A line that is older says nothing about an end that is noticed now."""
SETTLE_S = 2.0
REPEATED_S = 600.0
"""A warning of the engine that was logged so lately is not logged again: it gives the same one at every weight sync."""
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
        """Takes nothing yet; lines are logged in the context of whoever makes this (`about`)."""
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._saved: dict[int, int] = {}
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO, TextIO]] = []
        self._pipe: tuple[int, int] | None = None
        self._marks: dict[str, threading.Event] = {}
        self._logged: dict[str, float] = {}
        """Kinds of warnings → when one was logged, the newest last."""

    def about(self) -> None:
        """From now on lines are logged in the context of whoever calls this: the engine serves another job."""
        self._context = contextvars.copy_context()
        self._logged = {}

    @contextmanager
    def captured(self) -> Iterator[None]:
        """What is started within prints into this."""
        self._begin()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Gives this process its own output back, if it has not got it yet; what was started keeps the pipe."""
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
        """The newest line of late that names what went wrong, without what its logger put before it; empty when there is none.

        Blocks for up to `SETTLE_S`.
        """
        self._settle()
        since = time.monotonic() - RECENT_S
        lines = [line for at, line in reversed(self._lines) if at >= since]
        said = [(_PREFIX.match(line), line) for line in lines]
        texts = [(match.group(1), line[match.end() :].strip()) for match, line in said if match]
        causes = [text for _, text in texts if _ERROR.match(text) and not _NO_CAUSE.search(text)]
        told = [text for level, text in texts if level in {"ERROR", "CRITICAL"} and text and not _NO_CAUSE.search(text)]
        return next(iter(causes + told), "")

    def close(self) -> None:
        """The engine's processes have ended: reads what they left, and lets go of the pipe. Blocks for up to `SETTLE_S`."""
        self.release()
        self._settle()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe[1])  # the thread reads to the end; a process that kept its end keeps the thread

    def _begin(self) -> None:
        resource_tracker.ensure_running()  # Python's own, which lives as long as this process: it must not inherit the pipe
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
        """Waits, for a moment, until all that is in the pipe now was read."""
        if self._pipe is None:
            return
        mark, reached = f"<{secrets.token_hex(16)}>", threading.Event()
        self._marks[mark] = reached
        os.write(self._pipe[1], f"\n{mark}\n".encode())  # behind what is in it; the thread always reads
        reached.wait(SETTLE_S)
        del self._marks[mark]

    def _read(self, descriptor: int) -> None:
        """Every line until the last process that prints has ended; runs in a thread of its own."""
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
            found = _PREFIX.match(line)
            name = found and found.group(1)
            if name != "WARNING" or self._is_new(line):
                level = logging.getLevelNamesMapping()[name or "INFO"]
                self._context.run(log.log, level, "%s", line)

    def _is_new(self, line: str) -> bool:
        """Whether nothing like it, numbers aside, was logged of late."""
        # `about` may begin another table meanwhile.
        logged = self._logged
        kind, now = _NUMBER.sub("0", line), time.monotonic()
        if now - logged.get(kind, -REPEATED_S) < REPEATED_S:
            return False
        logged.pop(kind, None)
        logged[kind] = now
        if len(logged) > KEPT_LINES:
            del logged[next(iter(logged))]
        return True


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
