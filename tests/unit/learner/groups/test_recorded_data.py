"""Files and draws of earlier releases: a job that is resumed meets the same tasks in the same order."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from services.common.config.settings import Settings
from services.common.data import order, row_groups
from services.learner.groups.sources import Sources
from tests.unit.learner.scored_groups import job_spec

RECORDED = Path(__file__).parent / "recorded"
DRAWS = 90
TASKS = {None: "e34c9d82e995e87e6f7a9743275cb584", 33: "a171ea908845f2bbdc585bc84c24b7b8"}
"""Digest of the first 90 draws' tasks as MessagePack, by `size`: made by the release that read whole files into memory."""
FINGERPRINTS = {
    ("tasks.parquet", None): "ee3b69883aae131143393dd258acd570",
    ("tasks.parquet", 33): "06d72c9d854db46d77912f4d00d55d49",
    ("tasks.jsonl", None): "6aced9a45b66f1e8b952497d6b10a37c",
    ("tasks.jsonl", 33): "aee8489dda6f807b09ab7d186f1cea47",
}
FIRST = {None: [8, 5, 39, 38, 30, 34, 12, 0, 20, 9, 29, 14], 33: [8, 5, 30, 12, 0, 20, 9, 29, 14, 13, 17, 10]}


def sources(name: str, size: int | None) -> Sources:
    train = {"source": name, "prompt_template": "Q: {prompt}", "size": size}
    sections = {"train": train, "eval": {"source": name, "size": 5}, "seed": 11}
    spec = job_spec(data=sections, eval={"enabled": True, "tasks": 3})
    return Sources(spec.model_dump_json(), Settings(home=RECORDED.parent, data_roots=[RECORDED]).public())


@pytest.mark.parametrize("kept", [96 << 20, 2048, 1])
@pytest.mark.parametrize(("name", "size"), FINGERPRINTS)
def test_fingerprint_order_and_tasks_are_those_of_earlier_releases(
    monkeypatch: pytest.MonkeyPatch, name: str, size: int | None, kept: int
) -> None:
    """However much of a file is kept: all of it, the rows of a window, or one row."""
    monkeypatch.setattr(row_groups, "KEPT_BYTES", kept)
    found = sources(name, size)
    assert found.open_train() == {"tasks": size or 40, "fingerprint": FINGERPRINTS[name, size]}
    made = [found.training([ordinal, ordinal + 1], 60.0)[0] for ordinal in range(DRAWS)]
    assert [index for index, _, _ in made[:12]] == FIRST[size]
    assert (
        hashlib.blake2b(b"".join(payload or b"" for _, payload, _ in made), digest_size=16).hexdigest() == TASKS[size]
    )


@pytest.mark.parametrize("part", [1, 7, 64])
def test_an_order_that_is_sorted_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    whole = [order.next_indices(5, ordinal, 40, True, 40) for ordinal in (0, 40, 80)]
    whole = [list(indices) for indices in whole]
    monkeypatch.setattr(order, "_PART_TASKS", part)
    order._permutation.cache_clear()
    assert [list(order.next_indices(5, ordinal, 40, True, 40)) for ordinal in (0, 40, 80)] == whole
    order._permutation.cache_clear()
