r"""TeX's `\boxed{…}`, in which models are asked to put their answers."""

from __future__ import annotations

_OPENING = r"\boxed{"


def last_boxed(text: str) -> str | None:
    """What the last box holds, or None when there is no box or it is never closed."""
    start = text.rfind(_OPENING)
    if start < 0:
        return None
    depth = 1
    begin = start + len(_OPENING)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None
