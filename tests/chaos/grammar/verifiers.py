"""Verifiers that raise, hang, take all memory, or leave things behind; installed as a package of their own (`install`)."""

from __future__ import annotations

import random
from pathlib import Path

from tests import plugin_package
from tests.chaos.grammar.draft import Draft, Expected, Part, Parts

RAISING = (
    "raises",
    "exits",
    "dies",
    "recurses",
    "says_nothing",
    "is_no_score",
    "scores_nan",
    "raises_a_book",
    "raises_interrupt",
)
SLOW = (
    "hangs",
    "computes",
    "ignores_signals",
    "takes_memory",
    "takes_memory_slowly",
    "leaves_children",
    "talks",
    "opens_files",
    "starts_threads",
)


def install(folder: Path) -> dict[str, str]:
    """Puts them into a package, under `hostile_<name>`; the environment of a stack that finds it."""
    lines = [f"hostile_{name} = hostile_verifiers:{name}" for name in (*RAISING, *SLOW)]
    lines += ["hostile_missing = hostile_verifiers:nowhere", "hostile_import = no_such_package:verify"]
    module = Path(__file__).with_name("hostile_verifiers.py")
    return plugin_package.install(folder / "site", "hostile-verifiers", {"millrace.verifiers": lines}, module)


def _verifier(name: str, expected: Expected = Expected.ENDS) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        draft.set("reward.verifiers", {"*": f"hostile_{name}"})
        draft.expect(expected)

    return part


def _long_limit(draft: Draft, rng: random.Random) -> None:
    """A check may hold a slot of all jobs' verifiers for so long."""
    draft.set("reward.verifiers", {"*": rng.choice(("hostile_hangs", "hostile_computes"))})
    draft.set("reward.timeout_s", 600.0)


def _unknown(draft: Draft, rng: random.Random) -> None:
    draft.set(
        "reward.verifiers",
        rng.choice(({"*": "nope"}, {"*": "os.system"}, {"*": ""}, {"": "gsm8k"}, {"*": "x" * 10**5})),
    )


def _many(draft: Draft, _: random.Random) -> None:
    draft.set("reward.verifiers", {f"source-{number}": "gsm8k" for number in range(20_000)})


def _rubric(*functions: str, expected: Expected) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        rubric = {"verifier_function": [*functions], "verifier_weight": [1.0] * len(functions)}
        draft.set("reward", {"verifiers": {"*": "mixed"}, "rubrics": {"mixed": rubric}})
        draft.expect(expected)

    return part


def _endless_pattern(draft: Draft, _: random.Random) -> None:
    draft.set("reward", {"verifiers": {"*": "format"}, "config": {"format": {"format_pattern": "(.*.*)*x+y"}}})
    draft.expect(Expected.HARMLESS)


VERIFIERS: Parts = {
    **{f"verifier: {name}": _verifier(name) for name in RAISING},
    **{f"verifier: {name}": _verifier(name, Expected.HARMLESS) for name in SLOW},
    "verifier: missing": _verifier("missing"),
    "verifier: cannot be imported": _verifier("import"),
    "verifier: hangs with the longest limit": _long_limit,
    "verifier: a rubric of itself": _rubric("gsm8k", "mixed", expected=Expected.REFUSED),
    "verifier: a rubric of programs": _rubric("gsm8k", "code", expected=Expected.REFUSED),
    "verifier: a rubric of one that raises": _rubric("gsm8k", "hostile_raises", expected=Expected.ENDS),
    "verifier: a rubric of one that hangs": _rubric("gsm8k", "hostile_hangs", expected=Expected.HARMLESS),
    "verifier: a pattern that does not end": _endless_pattern,
    "verifier: unknown": _unknown,
    "verifier: very many": _many,
}
"""What runs out of time may count as a wrong answer: such a job trains on nothing, and may come to its end."""
