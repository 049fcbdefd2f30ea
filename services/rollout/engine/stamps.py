"""Stamps: the policy version of each token of a request whose outputs come in large pieces.

A version changes only while the engine is paused. What a request has by then was sampled by the versions before, read or not:

tokens of a request   0 ······· 40 ······· 64 ·······          pieces come at 1, 33, 65 …, and at the end
versions                  7     │    8     │    9              changed at 40 and 64
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

TOKENS_PER_PIECE = 32
"""An output comes for the first token of a rollout, then for so many, and for the end."""


class Stamps:
    """Changes of version within one request."""

    def __init__(self) -> None:
        self._changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By rollout: number of tokens at a change, and the version before it."""
        self._read: defaultdict[int, int] = defaultdict(int)

    def change(self, counts: Mapping[int, int], version: int) -> None:
        """Notes that each rollout has so many tokens at the end of this version."""
        for index, count in counts.items():
            self._changes[index].append((count, version))

    def split(self, index: int, count: int, version: int) -> Iterator[tuple[int, int, int]]:
        """Parts of the next `count` tokens of a rollout: begin and end within them, and the version; `version` is the present one.

        At least one part comes, which is empty where `count` is 0.
        """
        begin = first = self._read[index]
        self._read[index] = end = first + count
        for at, before in self._changes[index]:
            if begin < at:
                yield begin - first, min(at, end) - first, before
                begin = min(at, end)
        if begin < end or not count:
            yield begin - first, end - first, version


def tokens_so_far(llm: Any) -> dict[str, dict[int, int]]:  # noqa: ANN401  vLLM is untyped here
    """Request id → rollout → tokens that vLLM has received from the engine, of all requests in flight; whole while it is paused."""
    found: dict[str, dict[int, int]] = {}
    for state in llm.output_processor.request_states.values():
        request_id = (state.parent_req or state).external_req_id
        found.setdefault(request_id, {})[state.request_index] = state.detokenizer.num_output_tokens()
    return found
