"""Observations are checked where they arrive, whoever sent them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.environment.base import BadObservation, Message, Observation, observation_of, values_of

GOOD = Observation((Message("user", "higher"), Message("tool", "7")), reward=0.5, accuracy=None, detail="so far")


@pytest.mark.parametrize("observation", [GOOD, Observation(done=True, reward=-1.0, accuracy=0.25)])
def test_what_goes_in_comes_out(observation: Observation) -> None:
    assert observation_of(values_of(observation), most_chars=100) == observation


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": [["system", "x"]]}, "messages"),
        ({"messages": [["user", 7]]}, "messages"),
        ({"messages": "higher"}, "it returned no observation"),
        ({"messages": []}, "messages"),
        ({"messages": [["user", "x" * 101]]}, "messages: 101 characters"),
        ({"messages": [["user", "\ud83d"], ["user", "\ude00"]]}, "messages: no Unicode text"),
        ({"detail": "\ud800"}, "detail: no Unicode text"),
        ({"done": 1}, "it returned no observation"),
        ({"done": True, "reward": None}, "reward"),
        ({"reward": math.nan}, "reward"),
        ({"reward": math.inf}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"accuracy": 1.5}, "accuracy"),
        ({"accuracy": -0.1}, "accuracy"),
        ({"detail": None}, "it returned no observation"),
        ({"surprise": 1}, "it returned no observation"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], field: str) -> None:
    values = values_of(Observation(GOOD.messages, reward=0.5)) | wrong
    with pytest.raises(BadObservation, match=field):
        observation_of(values, most_chars=100)


@pytest.mark.parametrize("values", [None, [], "x", 7, {}, {"messages": []}])
def test_what_is_no_observation_is_refused(values: object) -> None:
    with pytest.raises(BadObservation, match="it returned no observation"):
        observation_of(values, most_chars=100)


def test_another_type_is_named() -> None:
    with pytest.raises(BadObservation, match="must return an Observation, not dict"):
        values_of({"done": True})
