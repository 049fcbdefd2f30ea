"""A checkpoint is there whole or not at all, and a damaged one is never loaded."""

from __future__ import annotations

import json
from pathlib import Path

from services.learner.checkpoint import LATEST, MANIFEST, CheckpointStore


def save(store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "model.bin").write_bytes(bytes([step]) * 1000)
    (folder / "hf.txt").write_text(f"step {step}")
    return store.commit(step, {"lineage": 1, "note": step})


def test_the_newest_checkpoint_comes_back_with_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    for step in (5, 10):
        save(store, step)
    newest = CheckpointStore(tmp_path, keep=2).newest()
    assert newest is not None
    assert (newest.step, newest.state) == (10, {"lineage": 1, "note": 10})
    assert (tmp_path / LATEST).read_text() == newest.path.name


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_what_was_never_committed_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    (store.begin(2) / "model.bin").write_bytes(b"half")
    newest = store.newest()
    assert newest is not None
    assert newest.step == 1


def test_any_damage_makes_the_previous_checkpoint_count(tmp_path: Path) -> None:
    def damage_byte(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    for damage in (damage_byte, cut, Path.unlink):
        for name in ("rank-0/model.bin", "hf.txt", MANIFEST):
            store = CheckpointStore(tmp_path / f"{damage.__name__}-{name.replace('/', '-')}", keep=2)
            save(store, 1)
            newest = save(store, 2)
            if name == MANIFEST and damage is damage_byte:
                manifest = json.loads((newest / MANIFEST).read_text())
                manifest["files"]["hf.txt"]["xxh3"] = "0" * 32
                (newest / MANIFEST).write_text(json.dumps(manifest))
            else:
                damage(newest / name)
            found = store.newest()
            assert found is not None
            assert found.step == 1
