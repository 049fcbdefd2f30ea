"""Values of any origin as JSON that MessagePack can carry too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_INT64 = 2**63


def jsonable(value: object) -> Any:  # noqa: ANN401  any JSON value
    """The nearest JSON value: tuples and sets become lists, keys text, NaN and infinities null.

    Integers beyond 64 bits and objects of other kinds become text; half a surrogate pair becomes `?`.
    """
    if isinstance(value, Mapping):
        return {_text(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # a NumPy scalar or array
        return jsonable(value.tolist())
    return _scalar(value)


def _scalar(value: object) -> str | int | float | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)
    return _text(value)


def _text(value: object) -> str:
    return str(value).encode(errors="replace").decode()
