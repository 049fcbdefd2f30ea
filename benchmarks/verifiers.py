"""Which of GSM8K's answers the verifiers and `math-verify` alone judge right and wrong, given in the forms that models give them in.

    python -m benchmarks.verifiers [FILE] [--rows 1319]

FILE: GSM8K's test.jsonl. For each row the right answer and a wrong one (it plus 1) are put into each form; a cell tells how many right
answers were judged wrong, and how many wrong ones right. `math-verify` is used as its readme does: `verify(parse(reference),
parse(response))`, where the reference is the number, and once more where it is the dataset's whole worked answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import math_verify

from benchmarks.peers.machine import describe_machine
from services.reward.verifiers import gsm8k, mathematics

REMARK = "plain text, a number after it"
"""The form in which the last number is not the answer, and nothing marks it."""
FORMS: dict[str, str] = {
    "#### N": "I add the numbers.\n#### {plain}",
    "#### N, thousands": "I add the numbers.\n#### {grouped}",
    "boxed": r"I add the numbers: \boxed{{{plain}}}",
    "boxed, dollars": r"I add the numbers: \boxed{{\${grouped}}}",
    "plain text": "I add 3 numbers. The answer is {plain}.",
    "plain text, dollars": "I add 3 numbers. The answer is ${grouped}.",
    "with a unit": "I add 3 numbers: she has {plain} apples.",
    "boxed, a number after it": r"So it is \boxed{{{plain}}}. I have checked it 2 times.",
    REMARK: "The answer is {plain}. That took 3 steps.",
    "a sum": "I add 3 numbers: 1 + {less} = {plain}",
}
"""Form → response, to be filled with the number as digits, with thousands commas, and less one."""

Judge = Callable[[str, str, str], bool]
"""(response, number, worked answer) → whether it is judged right."""


def by_gsm8k(response: str, number: str, _worked: str) -> bool:
    """Verifier `gsm8k`."""
    return gsm8k.verify(response, number, {}).accuracy == 1.0


def by_math(response: str, number: str, _worked: str) -> bool:
    """Verifier `math`."""
    return mathematics.verify(response, number, {}).accuracy == 1.0


def by_math_verify(response: str, number: str, _worked: str) -> bool:
    """math-verify alone; the reference is the number."""
    return bool(math_verify.verify(math_verify.parse(number), math_verify.parse(response)))


def by_math_verify_whole(response: str, _number: str, worked: str) -> bool:
    """math-verify alone; the reference is the worked answer."""
    return bool(math_verify.verify(math_verify.parse(worked), math_verify.parse(response)))


JUDGES: dict[str, Judge] = {
    "`gsm8k`": by_gsm8k,
    "`math`": by_math,
    "math-verify": by_math_verify,
    "math-verify, worked reference": by_math_verify_whole,
}


def responses(number: Decimal) -> dict[str, str]:
    """The number in every form."""
    return {
        form: text.format(plain=f"{number:f}", grouped=f"{number:,f}", less=f"{number - 1:f}")
        for form, text in FORMS.items()
    }


def rows(path: Path, most: int) -> list[tuple[Decimal, str]]:
    """Each row's number and its worked answer."""
    with path.open() as lines:
        worked = [str(json.loads(line)["answer"]) for line in lines][:most]
    return [(Decimal(answer.rpartition("####")[2].strip().replace(",", "")), answer) for answer in worked]


def count(judge: Judge, given: list[tuple[Decimal, str]]) -> dict[str, tuple[int, int]]:
    """Form → right answers judged wrong, wrong answers judged right."""
    faults = {form: [0, 0] for form in FORMS}
    for number, worked in given:
        reference = f"{number:f}"
        right, wrong = responses(number), responses(number + 1)
        for form, fault in faults.items():
            fault[0] += not judge(right[form], reference, worked)
            fault[1] += judge(wrong[form], reference, worked)
    return {form: (fault[0], fault[1]) for form, fault in faults.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="GSM8K's test.jsonl")
    parser.add_argument("--rows", type=int, default=1319, help="rows to judge, from the first")
    options = parser.parse_args()
    if options.file is None:
        print("not measured: no file was given")
        return
    given = rows(options.file, options.rows)
    found, seconds = {}, {}
    for name, judge in JUDGES.items():
        began = time.process_time()
        found[name] = count(judge, given)
        seconds[name] = (time.process_time() - began) / (2 * len(FORMS) * len(given))
    print(f"{len(given)} rows, {describe_machine()}\n")
    print("| form | " + " | ".join(JUDGES) + " |\n|---|" + "---|" * len(JUDGES))
    for form in FORMS:
        print(f"| {form} | " + " | ".join("{} / {}".format(*found[name][form]) for name in JUDGES) + " |")
    print("| CPU ms an answer | " + " | ".join(f"{1000 * seconds[name]:.2f}" for name in JUDGES) + " |")


if __name__ == "__main__":
    main()
