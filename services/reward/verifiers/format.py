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
from typing import Any

from services.common.spec.verifiers import FormatSettings
from services.reward.verifiers.base import Score, settings_of
from services.reward.verifiers.dapo_math import last_boxed


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:  # noqa: ARG001
    """Whether the response has the form. Raises VerifierError for a form that cannot be read."""
    wanted = settings_of(FormatSettings, extra_info)
    text, pattern = response.strip(), wanted.format_pattern
    fault = fault_of_tags(text, wanted.tags)
    if not fault and pattern is not None and not re.compile(pattern, re.DOTALL).fullmatch(text):
        fault = "it does not match format_pattern"
    if not fault and wanted.format_boxed and not (last_boxed(response) or "").strip():
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
