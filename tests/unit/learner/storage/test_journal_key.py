"""The key of a journal: what a file must hold, what a seal proves, and that the secret shows nowhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.learner.storage.journal import BatchRecord, Journal
from services.learner.storage.journal_key import FIRST, JournalKey, Proof, journal_key, tag_of
from tests.unit.learner.storage.test_journal import record

SECRET = b"correct horse battery staple"


@pytest.fixture
def key_file(tmp_path: Path) -> Callable[..., Path]:
    def make(secret: bytes = SECRET, name: str = "key") -> Path:
        path = tmp_path / name
        path.write_bytes(secret)
        return path

    return make


@pytest.fixture
def key(key_file: Callable[..., Path]) -> JournalKey:
    return JournalKey.read(key_file())


def proofs(root: Path, key: JournalKey | None) -> list[Proof]:
    return [found.proof for found in Journal(root, key).records()]


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (b"short", "must hold 16 to 4096 bytes, not 5"),
        (b" " * 100, "must hold 16 to 4096 bytes, not 0"),
        (b"a very long secret " * 500, "must hold 16 to 4096 bytes, not 9499"),
    ],
)
def test_a_file_that_is_no_key_is_refused_by_name_without_what_it_holds(
    key_file: Callable[..., Path], secret: bytes, message: str
) -> None:
    path = key_file(secret)
    with pytest.raises(ConfigError, match=message) as caught:
        JournalKey.read(path)
    assert str(path) in str(caught.value)
    assert "short" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        journal_key(Settings(journal_key_file=tmp_path / "nowhere"))
    assert journal_key(Settings()) is None


def test_white_space_around_the_secret_does_not_matter_and_the_secret_shows_nowhere(
    key_file: Callable[..., Path], key: JournalKey, caplog: pytest.LogCaptureFixture
) -> None:
    again = JournalKey.read(key_file(SECRET + b"\n", name="again"))
    assert again == key
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%s %r %s", key, key, key.id.hex())
    assert SECRET.decode() not in caplog.text
    assert "_secret" not in repr(key)


def test_records_with_and_without_a_key_are_read_alike(tmp_path: Path, key: JournalKey) -> None:
    Journal(tmp_path).append(record(1))
    sealed = Journal(tmp_path, key)
    sealed.append(record(2))
    sealed.append(record(3))
    for reader in (None, key):
        assert list(Journal(tmp_path, reader).records()) == [record(1), record(2), record(3)]
        assert list(Journal(tmp_path, reader).records(after_step=2)) == [record(3)]
    assert proofs(tmp_path, None) == [Proof.CHECKSUM, Proof.UNREAD, Proof.UNREAD]
    assert proofs(tmp_path, key) == [Proof.CHECKSUM, Proof.PROVED, Proof.PROVED]


def test_the_chain_goes_on_in_another_process_another_segment_and_after_a_cut(
    tmp_path: Path, key: JournalKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.learner.storage.journal.SEGMENT_BYTES", 1)
    for step in range(1, 5):
        Journal(tmp_path, key).append(record(step))
    assert len(list(tmp_path.glob("segment-*.wal"))) == 4
    assert proofs(tmp_path, key) == [Proof.PROVED] * 4
    newest = max(tmp_path.glob("segment-*.wal"))
    newest.write_bytes(newest.read_bytes()[:-3])  # torn: the next one follows step 3
    Journal(tmp_path, key).append(record(4))
    assert proofs(tmp_path, key) == [Proof.PROVED] * 4


def test_another_key_is_told_from_a_forged_record(
    tmp_path: Path, key: JournalKey, key_file: Callable[..., Path]
) -> None:
    other = JournalKey.read(key_file(b"another secret of some length", name="other"))
    Journal(tmp_path, key).append(record(1))
    assert proofs(tmp_path, other) == [Proof.FOREIGN]
    mac = key.seal(FIRST, b"payload")
    assert key.prove(mac, b"payload", FIRST) is Proof.PROVED
    assert key.prove(mac, b"payload", None) is Proof.PROVED
    assert key.prove(mac, b"another", FIRST) is Proof.FORGED
    assert key.prove(mac, b"payload", tag_of(None, b"something before")) is Proof.FORGED
    assert key.prove(replace(mac, value=bytes(32)), b"payload", FIRST) is Proof.FORGED


def test_any_flipped_byte_of_a_sealed_record_is_damage(tmp_path: Path, key: JournalKey) -> None:
    Journal(tmp_path, key).append(record(1))
    Journal(tmp_path, key).append(record(2))
    [segment] = tmp_path.glob("segment-*.wal")
    data = segment.read_bytes()
    for position in range(len(data)):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        assert damaged(tmp_path), position


def damaged(root: Path) -> bool:
    try:
        return list(Journal(root).records()) != [record(1), record(2)]
    except Exception as error:  # noqa: BLE001  any other than the journal's own fails the test
        return type(error).__name__ == "JournalError"


def test_the_digest_of_a_record_is_of_all_that_it_says() -> None:
    base = record(3)
    others: list[BatchRecord] = [
        replace(base, step=4), replace(base, lineage=9), replace(base, issued=99), replace(base, weights_digest="ab"),
        replace(base, settled=()), replace(base, groups=(*base.groups, b"")), replace(base, groups=(b"".join(base.groups),)),
    ]  # fmt: skip
    assert len({base.digest, *(other.digest for other in others)}) == len(others) + 1
    assert replace(base, proof=Proof.PROVED).digest == base.digest
