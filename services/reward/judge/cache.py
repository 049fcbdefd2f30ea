"""Cache of judges' answers, by a digest of the whole request; bounded, the least recently used go first.

It lies in the memory of one reward server, not in Redis: equal responses are mostly those of one group, or of a group that is issued again,
and come to the same server within seconds. Redis never evicts, and what it holds others would have to guard and to expire.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

MAX_ENTRIES = 20_000
MAX_BYTES = 64 * 1024**2
"""Of the answers' texts."""


def digest(endpoint: str, request: Mapping[str, Any]) -> bytes:
    """16 bytes that differ with the endpoint's name and anything in the request: model, text, parameters."""
    content = json.dumps([endpoint, request], sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


class AnswerCache:
    """Answers by digest."""

    def __init__(self, most: int = MAX_ENTRIES, most_bytes: int = MAX_BYTES) -> None:
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0

    def get(self, key: bytes) -> str | None:
        """The answer, or None."""
        if (answer := self._answers.get(key)) is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: str) -> None:
        """Keeps an answer, and drops others beyond the bounds."""
        self._bytes += _size(answer) - _size(self._answers.pop(key, None))
        self._answers[key] = answer
        while self._answers and (len(self._answers) > self._most or self._bytes > self._most_bytes):
            self._bytes -= _size(self._answers.popitem(last=False)[1])


def _size(answer: str | None) -> int:
    """Bytes, at most four a character: counting them exactly would encode every answer."""
    return 0 if answer is None else 4 * len(answer)
