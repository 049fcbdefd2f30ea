"""Code: the last code block of the response must pass the row's tests. Reward 1 where all pass, else 0. Off unless the operator allows it.

Tests are in the row's extra_info `tests`, else in its ground truth (texts of JSON are read), in one of the forms that datasets have:

- `{"inputs": [...], "outputs": [...]}`: standard input and output; with `fn_name` arguments and result of that function, or method of
  `Solution`; an input is then a list of arguments, or text with a JSON value on each line;
- `[{"input": …, "output": …}, …]`: the same;
- `["assert f(1) == 2", …]`: each a test; any other text is one: code that is run after the program, and must not raise.

`code_score: share` makes the share of passed tests the reward. `code_run_s` (default 2) limits one test, `code_memory_mib` (default 512)
its memory; the whole check has the job's `reward.timeout_s`. Tests that time does not suffice for are not passed.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from services.common.errors import ProgramError, VerifierError
from services.common.programs.sandbox import CODE_REWARD, Limits, Outcome, last_block, run
from services.common.spec.verifiers import CodeSettings
from services.reward.verifiers.base import Score, settings_of

MAX_TESTS = 256
DEFAULT_CHECK_S = 5.0
MARGIN_S = 0.3
"""Of the check's time, what reading the replies takes."""
TOLERANCE = 1e-6
"""Relative and absolute, of decimals in outputs."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test: what to run, and what must come of it."""

    run: dict[str, Any]
    expected: object
    """Text of standard output, a call's result, or a check's mark."""

    def fault(self, outcome: Outcome) -> str:
        """Why the test is not passed, for people; empty when it is."""
        if outcome.fault:
            return outcome.fault
        if "check" in self.run:
            return "" if outcome.note.get("passed") == self.expected else "it ended before the test did"
        if "call" in self.run:
            if "value" not in outcome.note:
                return "it ended before the call did"
            value = outcome.note["value"]
            return "" if _same_value(value, self.expected) else f"{value!r:.80} is not {self.expected!r:.80}"
        right = same_output(outcome.stdout, str(self.expected))
        return "" if right else f"{outcome.stdout[-80:]!r} is not {str(self.expected)[-80:]!r}"


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """Runs the tests. Raises VerifierError when there are none, they cannot be read, or programs do not run here."""
    tests = tests_of(extra_info.get("tests", ground_truth))
    options = settings_of(CodeSettings, extra_info)
    program = last_block(response)
    if program is None:
        return Score(0.0, 0.0, "no code block found")
    seconds = max(0.1, extra_info.get("check_timeout_s", DEFAULT_CHECK_S) - MARGIN_S)
    limits = Limits(seconds, min(seconds, options.code_run_s), options.code_memory_mib)
    try:
        outcomes = run(program, [test.run for test in tests], limits, setting=CODE_REWARD)
    except ProgramError as error:
        raise VerifierError(str(error)) from error
    faults = [test.fault(outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    passed = faults.count("")
    detail = f"{passed} of {len(tests)} tests passed"
    if passed < len(tests):
        number = next(number for number, fault in enumerate(faults, 1) if fault)
        detail += f"; test {number}: {faults[number - 1]}"
    accuracy = float(passed == len(tests))
    return Score(passed / len(tests) if options.code_score == "share" else accuracy, accuracy, detail)


def tests_of(given: object) -> list[Test]:
    """The tests in a row's value. Raises VerifierError when there are none or too many, or their form is another."""
    if isinstance(given, str):
        given = _json(given)
    tests = list(_tests(given))
    if not 1 <= len(tests) <= MAX_TESTS:
        raise VerifierError(f"the row has {len(tests)} tests, and must have 1 to {MAX_TESTS}")
    return tests


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are the same but for spaces, and for the last digits of decimals."""
    left, right = found.split(), expected.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _tests(given: object) -> Iterator[Test]:
    match given:
        case str(code) if code.strip():
            yield _check(code)
        case {"inputs": [*inputs], "outputs": [*outputs], **more} if len(inputs) == len(outputs):
            for entered, expected in zip(inputs, outputs, strict=True):
                yield _pair(entered, expected, more.get("fn_name"))
        case [*parts] if all(isinstance(part, str) for part in parts):
            yield from (_check(str(part)) for part in parts)
        case [*parts] if all(isinstance(part, dict) and {"input", "output"} <= part.keys() for part in parts):
            for part in cast("list[dict[str, object]]", parts):
                yield _pair(part["input"], part["output"], part.get("fn_name"))
        case _:
            raise VerifierError("the row's tests have none of the forms that docs/rewards.md names")


def _check(code: str) -> Test:
    mark = secrets.token_hex(16)
    return Test({"check": code, "mark": mark}, mark)


def _pair(entered: object, expected: object, function: object) -> Test:
    if not function:
        return Test({"stdin": _text(entered)}, _text(expected))
    try:
        arguments = [json.loads(line) for line in entered.splitlines()] if isinstance(entered, str) else entered
        result = json.loads(expected) if isinstance(expected, str) and isinstance(entered, str) else expected
    except ValueError as error:
        raise VerifierError(f"an input or output of {function} is no JSON: {error}") from error
    if not isinstance(arguments, list | tuple):
        raise VerifierError(f"an input of {function} must be a list of arguments")
    return Test({"call": str(function), "arguments": arguments}, result)


def _text(value: object) -> str:
    """Standard input or output; a list is its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _json(text: str) -> object:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        decimal = "." in expected and math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
    return decimal


def _same_value(found: object, expected: object) -> bool:
    """Whether two JSON values are the same; tuples and lists are, and decimals within the tolerance."""
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(_same_value, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(_same_value(found[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(found) is type(expected) and found == expected
