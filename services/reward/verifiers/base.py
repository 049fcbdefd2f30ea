"""Interface of verifiers, their signature and the score that they return; and their registry by name, which only worker processes use.

A plug-in is any callable of this signature, offered by an installed package under the entry-point group `millrace.verifiers`:

    [project.entry-points."millrace.verifiers"]
    my_check = "my_package.checks:my_check"
"""

from __future__ import annotations

import importlib
import math
import numbers
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from pydantic import ValidationError

from services.common.config.plugins import VERIFIERS, offered
from services.common.config.verifiers import BuiltIn
from services.common.errors import VerifierError
from services.common.spec.base import Section
from services.common.spec.job import problems_of


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a verifier for one response. Example: Score(reward=-1.0, accuracy=0.0, detail="41 is not 42")."""

    reward: float
    """Finite; the verifier chooses the scale (0 and 1, or −1 and 1)."""
    accuracy: float
    """0..1, before any shaping; dynamic sampling uses it."""
    detail: str = ""
    """For people: the compared values."""

    def __post_init__(self) -> None:
        """Raises VerifierError when the reward is not finite, or the accuracy is not within 0..1."""
        if not math.isfinite(self.reward):
            raise VerifierError(f"reward must be finite, not {self.reward}")
        if not 0.0 <= self.accuracy <= 1.0:
            raise VerifierError(f"accuracy must be within 0..1, not {self.accuracy}")


class Verifier(Protocol):
    """A check of one response. It runs in a process of its own that may be killed at any moment.

    A response without a meaning is a wrong answer: the verifier returns a Score for it. Any exception counts as a failure of the
    verifier itself: the check is repeated once, and then the verdict is FAILED, without a reward. A check that takes more time or memory
    than allowed counts as a wrong answer, with the lowest reward of the verifier: its attribute `lowest_reward`, by default 0.
    """

    def __call__(self, response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score | float | bool:
        """Judges the response; a number or a truth value stands for the score that `as_score` makes of it.

        Args:
            response: decoded text of the rollout (its end, when it is very long).
            ground_truth: the row's reference answer.
            extra_info: the job's `reward.config` of this verifier, the row's extra_info over it (JSON values), the row's `data_source`, and
                `check_timeout_s`, the limit of this check.
        """


def as_score(result: object) -> Score:
    """The score that a verifier's result stands for: of True 1, of False 0, of a number the number as reward and, cut to 0..1, as accuracy.

    Raises VerifierError for a number that is not finite, or any other type.
    """
    if isinstance(result, Score):
        return Score(float(result.reward), float(result.accuracy), result.detail)
    if isinstance(result, numbers.Real) and math.isfinite(result):
        return Score(float(result), min(max(float(result), 0.0), 1.0))
    raise VerifierError(f"a verifier returns a Score, a finite number or a truth value, not {result!r:.80}")


def lowest_reward(verifier: object) -> float:
    """The lowest reward that a verifier declares. Raises VerifierError when it is not a finite number."""
    declared = getattr(verifier, "lowest_reward", 0.0)
    if isinstance(declared, bool) or not isinstance(declared, int | float) or not math.isfinite(declared):
        raise VerifierError(f"lowest_reward must be a finite number, not {declared!r}")
    return float(declared)


S = TypeVar("S", bound=Section)


def settings_of(kind: type[S], extra_info: dict[str, Any]) -> S:
    """The settings in a row's extra_info, of which the job's are a part. Raises VerifierError, which names the first wrong one."""
    try:
        return kind.model_validate({name: extra_info[name] for name in kind.model_fields.keys() & extra_info.keys()})
    except ValidationError as error:
        problem = problems_of(error, kind, "extra_info.")[0]
        raise VerifierError(str(problem)) from error


def right_or_wrong(right: bool, found: str | None, reference: str, *, wrong_reward: float = 0.0) -> Score:
    """Reward 1 for a right answer, `wrong_reward` for any other, with the reason as its detail."""
    if right:
        return Score(1.0, 1.0, f"{found} is right")
    return Score(wrong_reward, 0.0, "no answer found" if found is None else f"{found} is not {reference}")


_MODULES = {
    BuiltIn.MATH: "mathematics",
    BuiltIn.DAPO_MATH: "dapo_math",
    BuiltIn.GSM8K: "gsm8k",
    BuiltIn.REASONING_GYM: "procedural",
    BuiltIn.MULTIPLE_CHOICE: "multiple_choice",
    BuiltIn.EXACT_MATCH: "exact_match",
    BuiltIn.FUZZY_MATCH: "fuzzy_match",
    BuiltIn.FORMAT: "format",
    BuiltIn.CODE: "code",
}


def load(name: str) -> Verifier:
    """The verifier of this name: built-in, else of an installed package. Raises VerifierError when there is none, or its import fails."""
    try:
        if name in _MODULES:
            module = importlib.import_module(f"services.reward.verifiers.{_MODULES[BuiltIn(name)]}")
            return cast("Verifier", module.verify)
        if name in offered(VERIFIERS):
            return cast("Verifier", offered(VERIFIERS)[name].load())
    except (ImportError, AttributeError) as error:
        raise VerifierError(f"verifier {name!r} cannot be loaded: {error}") from error
    raise VerifierError(f"there is no verifier {name!r} on this server")
