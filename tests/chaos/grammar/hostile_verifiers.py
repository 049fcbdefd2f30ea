"""Verifiers of a hostile hand, loaded by entry point; see `tests.chaos.grammar.verifiers.install`."""

# ruff: noqa: ARG001  every verifier has the same three arguments

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

Extra = dict[str, Any]


def raises(response: str, ground_truth: str, extra_info: Extra) -> Any:
    raise ValueError(f"cannot cope with {response!r}")


def raises_a_book(response: str, ground_truth: str, extra_info: Extra) -> Any:
    raise ValueError("x" * 50_000_000)


def raises_interrupt(response: str, ground_truth: str, extra_info: Extra) -> Any:
    raise KeyboardInterrupt


def exits(response: str, ground_truth: str, extra_info: Extra) -> Any:
    os._exit(0)


def dies(response: str, ground_truth: str, extra_info: Extra) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def recurses(response: str, ground_truth: str, extra_info: Extra) -> Any:
    sys.setrecursionlimit(10**9)
    return recurses(response + "x", ground_truth, extra_info)


def says_nothing(response: str, ground_truth: str, extra_info: Extra) -> Any:
    return None


def is_no_score(response: str, ground_truth: str, extra_info: Extra) -> Any:
    return {"score": "x" * 10_000_000}


def scores_nan(response: str, ground_truth: str, extra_info: Extra) -> Any:
    from services.reward.verifiers.base import Score

    return Score(float("nan"), 1.0)


def hangs(response: str, ground_truth: str, extra_info: Extra) -> Any:
    time.sleep(10**6)


def computes(response: str, ground_truth: str, extra_info: Extra) -> Any:
    while True:
        pass


def ignores_signals(response: str, ground_truth: str, extra_info: Extra) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def takes_memory(response: str, ground_truth: str, extra_info: Extra) -> Any:
    return bytearray(64 * 1024**3)


def takes_memory_slowly(response: str, ground_truth: str, extra_info: Extra) -> Any:
    taken: list[bytearray] = []
    while True:
        taken.append(bytearray(b"x") * 16 * 1024**2)
        time.sleep(0.01)


def leaves_children(response: str, ground_truth: str, extra_info: Extra) -> Any:
    for _ in range(3):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    time.sleep(10**6)


def talks(response: str, ground_truth: str, extra_info: Extra) -> Any:
    while True:
        sys.stdout.write("x" * 65_536)
        sys.stderr.write("x" * 65_536)


def opens_files(response: str, ground_truth: str, extra_info: Extra) -> Any:
    held: list[int] = []
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))


def starts_threads(response: str, ground_truth: str, extra_info: Extra) -> Any:
    for _ in range(2000):  # there may be neighbours on this machine
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    time.sleep(10**6)
