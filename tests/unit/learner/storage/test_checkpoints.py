"""A checkpoint is there whole or not at all, and a damaged one is never loaded."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from services.common.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    CheckpointRefused,
    WrittenFile,
    digest_of_file,
    read_manifest,
)
from services.common.errors import Fenced
from services.learner.storage.checkpoints import LATEST, CheckpointStore


class Usage(NamedTuple):
    """Of a disk."""

    free: int


def save(store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "model.bin").write_bytes(bytes([step]) * 1000)
    (folder / "hf.txt").write_text(f"step {step}")
    names = ("rank-0/model.bin", "hf.txt")
    written = [WrittenFile(n, (folder / n).stat().st_size, digest_of_file(folder / n)) for n in names]
    return store.commit(step, {"lineage": 1, "note": step}, written)


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
            damage(newest / name)
            found = store.newest()
            assert found is not None
            assert found.step == 1


def test_a_thousand_flipped_bits_are_each_detected_and_the_previous_checkpoint_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    newest = save(store, 2)
    rng = random.Random(7)
    files = [newest / name for name in ("rank-0/model.bin", "hf.txt", MANIFEST)]
    for trial in range(1000):
        file = files[trial % len(files)]
        data = file.read_bytes()
        position, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        file.write_bytes(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :])
        found = store.newest()
        assert found is not None
        assert found.step == 1, (file.name, position, bit)
        file.write_bytes(data)
    found = store.newest()
    assert found is not None
    assert found.step == 2


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    newest = save(CheckpointStore(tmp_path, keep=2), 1)
    manifest = newest / MANIFEST
    data = manifest.read_bytes()
    for position in range(len(data)):
        for flipped in (data[position] ^ 1, data[position] ^ 0x20, ord(" ")):
            if flipped != data[position]:
                manifest.write_bytes(data[:position] + bytes([flipped]) + data[position + 1 :])
                with pytest.raises(CheckpointError, match=MANIFEST):
                    read_manifest(newest)


def test_a_format_of_another_release_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    (save(store, 2) / MANIFEST).write_text(json.dumps({"format": 1, "step": 2, "state": {}, "files": {}}))
    with pytest.raises(CheckpointRefused, match="format 1 is not known"):
        store.newest()


def test_a_file_that_is_not_as_its_writer_says_is_not_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (store.begin(3) / "a").write_bytes(b"12")
    for written in (WrittenFile("a", 3, ""), WrittenFile("b", 2, "")):
        with pytest.raises(CheckpointError, match="missing, or not"):
            store.commit(3, {}, [written])
    assert store.newest() is None


def test_nothing_is_begun_without_room_and_what_was_never_committed_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    (store.begin(2) / "half").write_bytes(b"x")
    size = next(store.manifests()).size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(int(size * 1.2) - 1))
    with pytest.raises(OSError, match="No space left") as raised:
        store.begin(3)
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.glob("*.tmp")) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(int(size * 1.2)))
    assert store.begin(3).is_dir()


def test_one_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    allowed = True

    def guard() -> None:
        if not allowed:
            raise Fenced("a newer head writes")

    store = CheckpointStore(tmp_path, keep=2, guard=guard)
    save(store, 1)
    (store.begin(2) / "model.bin").write_bytes(b"half")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    allowed = False
    with pytest.raises(Fenced):
        store.begin(3)
    with pytest.raises(Fenced):
        store.commit(2, {}, [])
    with pytest.raises(Fenced):
        store.discard(2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
