"""Verifiers that misbehave in every way; the tests install them as a package of their own and load them by entry point."""

# ruff: noqa: ARG001  every verifier has the same three arguments

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from services.reward.verifiers.base import Score

MARK_FILE = "ODD_VERIFIERS_MARK"


def always_right(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0, 1.0, f"{len(response)} characters, {ground_truth}, {extra_info.get('data_source')}")


def sleep(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    time.sleep(float(response))
    return Score(1.0, 1.0, "awake")


def endless_regex(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0 if re.fullmatch(r"(a+)+b", response) else 0.0, 0.0)


def raises(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    raise ValueError(f"cannot cope with {response!r}")


def fails_once(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    mark = Path(os.environ[MARK_FILE])
    if not mark.exists():
        mark.touch()
        raise OSError("the first time is hard")
    return Score(1.0, 1.0)


def dies(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    os.kill(os.getpid(), signal.SIGKILL)
    return Score(1.0, 1.0)


def computes_in_threads(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """As if the kernel had counted the processor time of all its threads."""
    os.kill(os.getpid(), signal.SIGXCPU)
    time.sleep(60)
    return Score(1.0, 1.0)


def exits(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    raise SystemExit(0)


def not_a_score(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    return "right"


def number(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return float(response)


def truth(response: str, ground_truth: str, extra_info: dict[str, Any]) -> bool:
    return response == ground_truth


def nan(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(float("nan"), 1.0)


def eats_memory(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0, 1.0, str(len(bytearray(64 * 1024**3))))


def takes_memory(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0, 1.0, str(len(bytearray(int(response) * 1024**2))))


def strict(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return {"sleep": sleep, "eat": eats_memory}[response]("60", ground_truth, extra_info)


vars(strict)["lowest_reward"] = -2.5


def declares_nonsense(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0, 1.0)


vars(declares_nonsense)["lowest_reward"] = "low"


def shows_environment(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0, 1.0, ",".join(sorted(name for name in os.environ if "MILLRACE" in name or "REDIS" in name)))


def leaves_a_child(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    child = subprocess.Popen(["sleep", "60"])
    Path(response).write_text(str(child.pid))
    time.sleep(60)
    return Score(1.0, 1.0)


def leaves_strangers(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """As `leaves_a_child`, but in sessions of their own, one of them with a parent that has ended."""
    hidden = subprocess.run(
        ["sh", "-c", "sleep 60 & echo $!"], stdout=subprocess.PIPE, check=True, start_new_session=True
    )
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with Path(response).open("a") as note:
        note.write(f"{child.pid} {int(hidden.stdout)} ")
    time.sleep(float(ground_truth))
    return Score(1.0, 1.0, str(os.getpid()))


def process(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(1.0, 1.0, str(os.getpid()))


def gsm8k(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    return Score(-7.0, 0.0, "an impostor")
