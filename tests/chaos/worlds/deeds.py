"""Deeds of a hostile world: it dies, hangs, takes all memory, breeds processes, says nonsense, or talks out of turn.

Each gets the limit of an answer, seconds, and returns what the world answers, if it returns.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack

from services.environment.base import Message, Observation

ANSWER = Observation((Message("user", "go on"),))
SHOUT_CHARS = 100_000_000
_DOUBLINGS = 5
"""Of the fork bomb: 32 processes. Nothing but time bounds a real one, and this machine has neighbours."""
_SOON_S = 0.02
_JUST_BEFORE_S = 0.1

Deed = Callable[[float], Any]


def die(number: signal.Signals) -> Deed:
    def deed(_: float) -> Any:
        os.kill(os.getpid(), number)
        return ANSWER

    return deed


def leave(_: float) -> None:
    os._exit(3)


def sleep(_: float) -> None:
    time.sleep(600.0)


def spin(_: float) -> None:
    while True:
        pass


def be_deaf(_: float) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    sleep(0.0)


def take_memory(_: float) -> Observation:
    return Observation((Message("user", "x" * (8 << 30)),))


def take_memory_slowly(_: float) -> None:
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


def fork_bomb(_: float) -> None:
    for doubling in range(_DOUBLINGS):
        if os.fork() == 0 and doubling % 2:
            os.setsid()  # out of the group that is killed
    sleep(0.0)


def shout(_: float) -> Observation:
    return Observation((Message("user", "x" * SHOUT_CHARS),))


def say_a_little_too_much(_: float) -> Observation:
    return Observation((Message("user", "x" * 3000), Message("tool", "y" * 3000)))


def say_many_messages(_: float) -> Observation:
    return Observation((Message("user", ""),) * 100_000)


def sockets() -> list[int]:
    """The open sockets: the one to the parent."""
    found = []
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
    return found


def say(data: bytes) -> None:
    for descriptor in sockets():
        os.write(descriptor, data)


def packed(text: str, *number: int) -> bytes:
    values = {"messages": [["user", text]], "done": False, "reward": None, "accuracy": None, "detail": ""}
    return bytes(msgpack.packb([*number, "value", values]))


def write(data: bytes) -> Deed:
    def deed(_: float) -> Observation:
        say(data)
        return ANSWER

    return deed


def write_endlessly(_: float) -> None:
    while True:
        say(b"\xdb\xff\xff\xff\xff" + b"x" * 60_000)


def answer_again_later(_: float) -> Observation:
    return _later(threading.Timer(_SOON_S, say, [packed("nobody asked")]))


def die_later(_: float) -> Observation:
    return _later(threading.Timer(_SOON_S, os.kill, [os.getpid(), signal.SIGKILL]))


_LATER: list[threading.Timer] = []


def _later(deed: threading.Timer) -> Observation:
    _LATER.append(deed)
    deed.start()
    return ANSWER


def wait_for_later() -> None:
    """Until what is to be done while the policy thinks is done, however busy the machine is; each turn begins with it."""
    while _LATER:
        _LATER.pop().join()


def close_the_socket(_: float) -> None:
    for descriptor in sockets():
        os.close(descriptor)
    sleep(0.0)


def close_the_socket_late(limit_s: float) -> None:
    time.sleep(max(0.0, limit_s - _JUST_BEFORE_S))
    close_the_socket(0.0)


def die_late(limit_s: float) -> None:
    time.sleep(max(0.0, limit_s - _JUST_BEFORE_S))
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_: float) -> None:
    raise KeyError("on purpose")


def exit_by_exception(_: float) -> None:
    raise SystemExit(0)


def nest_deeply(_: float) -> Any:
    return nest_deeply(0.0)


def wrong(**fields: Any) -> Deed:
    return lambda _: Observation(**{"messages": (Message("user", "go on"),), **fields})


DEEDS: dict[str, Deed] = {
    "dies": die(signal.SIGKILL), "memory bomb": take_memory, "answers twice": write(packed("first") + packed("second")),
    "shouts 100 MB": shout, "sleeps": sleep, "answers two turns at once": write(b"".join(packed("early", n) for n in range(9))),
    "fork bomb": fork_bomb, "leaves": leave, "memory bomb, slow": take_memory_slowly, "answers again later": answer_again_later,
    "segfaults": die(signal.SIGSEGV), "spins": spin, "writes junk": write(b"\xc1\xc1\xc1 junk"), "stops": die(signal.SIGSTOP),
    "dies later": die_later, "closes its socket": close_the_socket, "writes endlessly": write_endlessly, "is deaf": be_deaf,
    "writes a number": write(b"\x07"), "closes its socket late": close_the_socket_late, "raises": fail, "dies late": die_late,
    "exits by an exception": exit_by_exception, "nests deeply": nest_deeply, "says too much": say_a_little_too_much,
    "says many messages": say_many_messages, "says a dictionary": lambda _: {"done": True, "reward": 1.0},
    "role system": wrong(messages=(Message("system", "you must"),)),  # type: ignore[arg-type]  # on purpose
    "surrogate": wrong(messages=(Message("user", "\ud800"),)), "no message": wrong(messages=()),
    "reward NaN": wrong(done=True, reward=math.nan), "no reward": wrong(done=True),
    "accuracy 2": wrong(done=True, reward=1.0, accuracy=2.0),
}  # fmt: skip
"""By name."""
