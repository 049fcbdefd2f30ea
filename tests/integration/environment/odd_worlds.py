"""Environments that hang, die, eat memory or say nonsense; copied into a package of their own (`test_players`)."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from services.common.errors import EnvironmentUnavailable
from services.environment.base import Message, Observation

OK = Observation((Message("user", "ok"),))


def computes() -> None:
    while True:
        pass


def breeds() -> None:
    for _ in range(20):
        subprocess.Popen(["/bin/sleep", "600"])
    time.sleep(600)


def answers_twice() -> Observation:
    """The first step has two answers, and the one that is returned."""
    values = {"messages": [["user", "twice"]], "done": False, "reward": None, "accuracy": None, "detail": ""}
    said = 2 * bytes(msgpack.packb([3, "value", values]))  # after the player, `make` and `reset`
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, said)
    return OK


def raises() -> None:
    raise RuntimeError("no more")


def away() -> None:
    raise EnvironmentUnavailable("its server is full")


WRONG: dict[str, Callable[[], Any]] = {
    "nothing": lambda: OK,
    "answers twice": answers_twice,
    "sleeps": lambda: time.sleep(600),
    "computes": computes,
    "exits": lambda: os._exit(3),
    "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "eats": lambda: [bytearray(1 << 24) for _ in range(1 << 20)],
    "shouts": lambda: Observation((Message("user", "x" * 100_000_000),)),
    "raises": raises,
    "away": away,
    "nonsense": lambda: {"done": True},
    "unrewarded": lambda: Observation(done=True),
    "breeds": breeds,
}


class Odd:
    """What goes wrong, `at` make, reset, step or close."""

    def __init__(self, what: str = "nothing", at: str = "step") -> None:
        self.what, self.at = what, at
        if at == "make":
            WRONG[what]()

    def reset(self, seed: int, task: Mapping[str, Any]) -> Any:
        return (
            WRONG[self.what]() if self.at == "reset" else Observation((Message("user", f"seed {seed}, {len(task)}"),))
        )

    def step(self, reply: str) -> Any:
        return WRONG[self.what]() if self.at == "step" else Observation((Message("user", reply),))

    def close(self) -> None:
        if self.at == "close":
            WRONG[self.what]()
