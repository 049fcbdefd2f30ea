"""Places to fetch a version: a few here, the others at servers that have it."""

from __future__ import annotations

import pytest

from services.common.weight_sync import egress
from services.common.weight_sync.egress import Egress
from services.common.weights.snapshot import PolicyVersion

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def placed(places: Egress, server: str, version: PolicyVersion = V1, *, relays: bool = True) -> str | None:
    try:
        return places.place(server, version, relays=relays, timeout_s=0.0)
    except TimeoutError:
        return None


def test_the_first_few_fetch_here_and_the_next_waits_until_one_has_reported() -> None:
    places = Egress(direct=2, per_relay=1)
    assert [placed(places, name) for name in ("a", "b", "c")] == ["", "", None]
    places.reported("a", "a:1", V1, failed=False)
    assert [placed(places, name) for name in ("c", "d")] == ["a:1", None]


def test_what_leaves_here_does_not_grow_with_the_number_of_servers() -> None:
    places = Egress(direct=2, per_relay=2)
    waiting, fetching, direct, rounds = [f"s{i}" for i in range(100)], list[str](), 0, 0
    while waiting:
        for name in list(waiting):
            sender = placed(places, name)
            if sender is None:
                break
            direct += sender == ""
            fetching.append(name)
            waiting.remove(name)
        for name in fetching:
            places.reported(name, f"{name}:1", V1, failed=False)
        fetching, rounds = [], rounds + 1
    assert direct == 2
    assert rounds <= 5  # 2, then 4, 12, 36 more …


def test_a_server_with_another_version_gives_none_on() -> None:
    places = Egress(direct=1)
    places.reported("a", "a:1", V1, failed=False)
    assert placed(places, "b", V2) == ""


def test_a_failed_activation_frees_the_place_and_makes_no_relay() -> None:
    places = Egress(direct=1)
    assert placed(places, "a") == ""
    places.reported("a", "a:1", V1, failed=True)
    assert placed(places, "b") == ""


def test_the_relay_with_the_fewest_is_taken() -> None:
    places = Egress(per_relay=2)
    for name in ("a", "b"):
        places.reported(name, f"{name}:1", V1, failed=False)
    assert sorted(filter(None, (placed(places, f"s{i}") for i in range(5)))) == ["a:1", "a:1", "b:1", "b:1"]


def test_a_relay_that_failed_is_given_to_nobody_else() -> None:
    places = Egress(direct=1)
    places.reported("a", "a:1", V1, failed=False)
    assert placed(places, "b") == "a:1"
    assert placed(places, "b", relays=False) == ""
    assert placed(places, "c") == ""


def test_a_place_is_free_again_when_its_server_is_never_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Egress(direct=1)
    monkeypatch.setattr(egress, "PLACE_S", -1.0)
    assert [placed(places, name) for name in ("a", "b")] == ["", ""]


def test_a_server_that_knows_no_relays_never_waits() -> None:
    places = Egress(direct=1)
    assert [placed(places, f"s{i}", relays=False) for i in range(5)] == [""] * 5
