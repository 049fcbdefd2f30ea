"""A question to answer, with Python at hand: a reply with a code block is run, and its output comes back; any other is the answer.

Programs run as those of verifier `code` do (services/common/programs), and only where the operator lets them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.programs.sandbox import CODE_ENVIRONMENT, Limits, Outcome, last_block, run
from services.environment.base import Message, Observation
from services.environment.switches import programs_fault
from services.environment.worlds.settings import require_seconds, require_text, require_whole

START_S = 60.0
"""Longest start of the runner; where it is slow, the episode fails at `environment.step_timeout_s`, and no program is late for that."""
INSTRUCTIONS = (
    "You may write Python code in a block that begins with ```python and ends with ```. It is run, and what it prints comes back. "
    "Each block starts anew. A reply without a block is your answer: end it with #### and the answer alone."
)
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


@dataclass
class Python:
    """The row's `extra_info` holds question and answer. A program may print `output_chars` characters, and take `seconds`."""

    calls: int = 4
    """Programs that one episode may run."""
    seconds: float = 2.0
    """Of one program; `environment.step_timeout_s` must be longer by 3."""
    memory_mib: int = 512
    output_chars: int = 1000
    question: str = "question"
    """Key of `extra_info`."""
    answer: str = "answer"
    """Key of `extra_info`."""
    instructions: str = INSTRUCTIONS
    """Text before the question; may be empty."""
    _expected: str = field(default="", init=False)
    _left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises ValueError where programs do not run, and for a setting out of its range."""
        for name, least, most in (("calls", 0, 100), ("memory_mib", 64, 65_536), ("output_chars", 1, 1_000_000)):
            require_whole(name, getattr(self, name), least, most)
        require_seconds("seconds", self.seconds, 600.0)
        for name in ("question", "answer", "instructions"):
            require_text(name, getattr(self, name))
        if fault := programs_fault():
            raise ValueError(f"it runs programs that the model writes: {fault}")

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:  # noqa: ARG002  an `Environment`
        """Asks. Raises ValueError where the row has no question or no answer."""
        question, self._expected = (_text(task, key) for key in (self.question, self.answer))
        self._left = self.calls
        return Observation((Message("user", f"{self.instructions}\n\n{question}".lstrip()),))

    def step(self, reply: str) -> Observation:
        """Runs the reply's last block, or judges the answer. Raises ProgramError where programs cannot be run."""
        program = last_block(reply)
        if program is None:
            given = answer_of(reply)
            right = is_same(given, answer_of(self._expected))
            return _end(float(right), f"{given:.80} is {'right' if right else 'not ' + answer_of(self._expected)[:80]}")
        if not self._left:
            return _end(0.0, f"more than {self.calls} programs")
        self._left -= 1
        limits = Limits(self.seconds + START_S, self.seconds, self.memory_mib)
        (outcome,) = run(program, [{"stdin": ""}], limits, setting=CODE_ENVIRONMENT)
        return Observation((Message("tool", shown(outcome, self.output_chars)),))

    def close(self) -> None:
        """Has nothing to close."""


def answer_of(text: str) -> str:
    """The answer in a text: what stands behind the last `####`, as rows of GSM8K have it, else the whole text."""
    return text.rpartition("####")[2].strip()


def is_same(given: str, expected: str) -> bool:
    """Whether two answers are the same number, or the same text but for case and spaces."""
    left, right = (each.replace(",", "").removeprefix("$").rstrip(".") for each in (given, expected))
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return float(left) == float(right)
    return given.casefold().split() == expected.casefold().split()


def shown(outcome: Outcome, most_chars: int) -> str:
    """A program's output as the policy sees it, cut to a length, and why it did not end well."""
    printed = outcome.stdout.strip()
    cut = f"{printed[:most_chars]}\n(cut: {len(printed)} characters)" if len(printed) > most_chars else printed
    parts = [cut, f"error: {outcome.fault}" if outcome.fault else ""]
    return "\n".join(filter(None, parts)) or "(nothing was printed)"


def _text(task: Mapping[str, Any], key: str) -> str:
    value = task.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"extra_info.{key} of the row must be a text or a number")
    return str(value)


def _end(reward: float, detail: str) -> Observation:
    return Observation(done=True, reward=reward, accuracy=reward, detail=detail)


ENVIRONMENT = Python
