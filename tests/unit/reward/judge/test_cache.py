"""The cache of answers: by the whole request, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.judge.cache import AnswerCache, digest

REQUEST: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 8,
    "temperature": 0.0,
}


@pytest.mark.parametrize(
    "other",
    [
        ("e", REQUEST | {"model": "n"}), ("e", REQUEST | {"messages": [{"role": "user", "content": "y"}]}),
        ("e", REQUEST | {"max_tokens": 9}), ("e", REQUEST | {"temperature": 1.0}), ("f", REQUEST),
    ],
)  # fmt: skip
def test_another_endpoint_model_text_or_parameter_is_another_answer(other: tuple[str, dict[str, Any]]) -> None:
    assert digest("e", REQUEST) == digest("e", dict(reversed(REQUEST.items())))
    assert digest("e", REQUEST) != digest(*other)


def test_the_least_recently_used_go_first() -> None:
    cache = AnswerCache(most=2)
    cache.put(b"a", "1")
    cache.put(b"b", "2")
    assert cache.get(b"a") == "1"
    cache.put(b"c", "3")
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["1", None, "3"]


def test_it_never_takes_more_than_its_bytes_also_for_one_huge_answer() -> None:
    cache = AnswerCache(most_bytes=400)
    for number in range(100):
        cache.put(bytes([number]), "x" * 25)
    assert sum(cache.get(bytes([number])) is not None for number in range(100)) == 4
    cache.put(b"huge", "x" * 101)
    assert cache.get(b"huge") is None
    cache.put(b"a", "x")
    cache.put(b"a", "yy")
    assert cache.get(b"a") == "yy"
