r"""Format: the response has the form that the prompt asks for. Reward 1 or 0.

One of these, from the row's extra_info or the job's `reward.config.format`:

- `format_tags` (default `[think, answer]`): `<think>…</think><answer>…</answer>`, each tag once, in this order, with text in each and only
  spaces around them;
- `format_pattern`: a regular expression (Python's, `.` matches line ends) that the whole response matches, spaces around it left out. It
  runs within the check's limit of time, like everything else;
- `format_boxed: true`: beside them, or alone with `format_tags: []`: a closed `\boxed{…}` that is not empty.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from services.common.errors import VerifierError
from services.reward.verifiers.base import Score
from services.reward.verifiers.dapo_math import last_boxed

TAGS = ("think", "answer")
_TAG = re.compile(r"[A-Za-z][\w-]{0,63}")


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:  # noqa: ARG001
    """Whether the response has the form. Raises VerifierError for a form that cannot be read."""
    pattern, boxed = extra_info.get("format_pattern"), bool(extra_info.get("format_boxed", False))
    tags = _tags(extra_info.get("format_tags", () if pattern is not None or boxed else TAGS))
    fault = fault_of_tags(response.strip(), tags)
    if not fault and pattern is not None and not _compiled(pattern).fullmatch(response.strip()):
        fault = "it does not match format_pattern"
    if not fault and boxed and not (last_boxed(response) or "").strip():
        fault = r"no closed \boxed{…} with a content"
    return Score(0.0, 0.0, fault) if fault else Score(1.0, 1.0, "as asked for")


def fault_of_tags(text: str, tags: tuple[str, ...]) -> str:
    """What is wrong with the tags of a text without spaces around it; empty when nothing is."""
    place = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        for mark in (opening, closing):
            if (count := text.count(mark)) != 1:
                return f"{mark} stands there {count} times"
        if text[place : text.find(opening)].strip() or text.find(opening) < place:
            return f"something other than spaces stands before {opening}"
        inner = text[text.find(opening) + len(opening) : text.find(closing)]
        if not inner.strip():
            return f"there is no text between {opening} and {closing}"
        place = text.find(closing) + len(closing)
    return f"something stands after </{tags[-1]}>" if tags and place < len(text) else ""


def _tags(given: object) -> tuple[str, ...]:
    if isinstance(given, list | tuple) and all(isinstance(tag, str) and _TAG.fullmatch(tag) for tag in given):
        return tuple(given)
    raise VerifierError(f"format_tags must be a list of names of tags, not {given!r}")


@lru_cache(maxsize=64)
def _compiled(pattern: object) -> re.Pattern[str]:
    try:
        return re.compile(str(pattern), re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise VerifierError(f"format_pattern cannot be read: {error}") from error
