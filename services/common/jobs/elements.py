"""Elements of a job's lists in Redis, and lines of its files: JSON objects."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)


def json_objects(raw: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """The JSON objects in these texts; numbers that JSON lacks (NaN) become null."""
    found = []
    for element in raw:
        try:
            value = json.loads(element, parse_constant=lambda _: None)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            log.warning("an element of a job's history is not a JSON object; it is left out")
    return found
