"""What children of the tests do, good and bad."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable

from services.common.errors import DataError, MillraceError

PREPARED: list[str] = []


class Stranger(MillraceError):  # noqa: N818  a test's own
    """An error of ours that the parent does not know."""


def prepare() -> None:
    PREPARED.append("ready")


def prepared() -> list[str]:
    return PREPARED


def add(a: int, b: int) -> int:
    return a + b


def echo(value: object) -> object:
    return value


def echo_slowly(body: bytes, _media_type: str) -> bytes:
    time.sleep(60.0)
    return body


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def spin() -> None:
    while True:
        pass


def deaf() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1.0)


def large(mib: int) -> int:
    return len(b"x" * (mib * 1024 * 1024))


def answer(mib: int) -> bytes:
    return b"x" * (mib * 1024 * 1024)


def nested() -> object:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    return value


def wrong_data() -> None:
    raise DataError("row 3: no", field="data.train")


def stranger() -> None:
    raise Stranger("far away")


def zero() -> float:
    return 1 / 0


def unknown() -> object:
    return {"it": Stranger}


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5.0)


def die_slowly(number: int) -> None:
    """As on a busy machine, where time passes between the end of a process's files and its own."""
    os.closerange(3, 256)
    time.sleep(0.3)
    os.kill(os.getpid(), number)


def leave(code: int) -> None:
    os._exit(code)


def breed() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


def environment() -> dict[str, str]:
    return dict(os.environ)


def write(path: str, mib: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open(path, "wb") as file:  # noqa: PTH123  plain
        file.writelines(b"x" * 1024 * 1024 for _ in range(mib))


def talk() -> None:
    sys.stdout.write("printed\n")
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.write(descriptor, b"printed")
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('printed')"], check=True)


def log_lines(count: int, size: int) -> None:
    for _ in range(count):
        logging.getLogger("talker").warning("logged %s", "x" * size)


def say(data: bytes) -> None:
    """Writes to the socket to the parent, past the server."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, data)


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add_and_say(self, number: int, data: bytes) -> int:
        say(data)
        return self.add(number)

    def close_and_sleep(self, after_s: float) -> None:
        time.sleep(after_s)
        os.closerange(3, 256)
        time.sleep(60.0)

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def fail(self) -> None:
        raise DataError("not this one")


counter: Callable[[int], Counter] = Counter
