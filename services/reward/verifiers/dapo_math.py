"""DAPO's rule reward (arXiv 2503.14476): the end of the response must contain `Answer: …`. Reward 1 or −1.

Answers are compared as text after the normalisation of quantitative reasoning benchmarks (arXiv 2206.14858, appendix on answer
normalisation): it removes units, articles, spaces and TeX decoration, and adds the braces of shorthand fractions and roots.
"""

from __future__ import annotations

import re
from typing import Any

from services.reward.verifiers.base import Score, right_or_wrong

WRONG = -1.0
"""Reward of a wrong answer."""

TAIL_CHARS = 300
"""Only this part of the response, its end, is read."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX = r"\boxed{"

_UNITS = [
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "sue", "points", "feet", "minutes", "digits",
    "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
]  # fmt: skip
_DECORATION = [
    r"\ldots", r"\dots", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\text{s}", r"\text{.}",
]  # fmt: skip
_EMPTY_TEXT = [r"\text{}^2", r"\text{}^3", r"\text{}"]

_REPLACED = [
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"), (r",\text{and}", ","),
    (r"\text{and}", ","), (r"\text{m}", r"\text{}"), *((gone, "") for gone in [*_UNITS, *_DECORATION, *_EMPTY_TEXT]),
]  # fmt: skip

_FORMULA = re.compile(r"^[^$]*\$([^$]*)\$.*$")
_WRAPPER = re.compile(r"\\(?:text|textbf|overline)\{|[{}]")

_REWRITTEN = [
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
]


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:  # noqa: ARG001
    r"""Compares the last `Answer: …` line, or where there is none the last `\boxed{…}`, with the reference."""
    found = stated_answer(response[-TAIL_CHARS:])
    reference = normalise(ground_truth)
    answer = None if found is None else normalise(found)
    return right_or_wrong(answer == reference, answer, reference, wrong_reward=WRONG)


vars(verify)["lowest_reward"] = WRONG


def stated_answer(text: str) -> str | None:
    r"""The text's last `Answer: …`, else its last `\boxed{…}`, else None."""
    stated = _ANSWER.findall(text)
    return stated[-1] if stated else last_boxed(text)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, in which models are prompted to put their answers; None where there is none that is closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOX)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def normalise(answer: str) -> str:
    """The answer without parts that do not change its meaning; of an equation, the right-hand side."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    answer = unwrapped(_FORMULA.sub(r"\1", answer))  # of text with a formula, the formula
    for pattern, new in _REWRITTEN:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return without_commas if without_commas.isdigit() else answer.strip()


def unwrapped(text: str) -> str:
    r"""The text without the wrappers `\text{…}`, `\textbf{…}`, `\overline{…}` at any depth; their content and unclosed wrappers stay."""
    pieces: list[str] = []
    # Places of unclosed braces. The piece of a wrapper is empty, unless it proves to be unclosed at the end.
    opened: list[int] = []
    wrappers: dict[int, str] = {}
    end = 0
    for match in _WRAPPER.finditer(text):
        pieces.append(text[end : match.start()])
        end, found = match.end(), match[0]
        if found == "}":
            if not opened or wrappers.pop(opened.pop(), None) is None:
                pieces.append(found)
            continue
        opened.append(len(pieces))
        if found == "{":
            pieces.append(found)
        else:
            wrappers[len(pieces)] = found
            pieces.append("")
    for place, opening in wrappers.items():
        pieces[place] = opening
    return "".join([*pieces, text[end:]])
