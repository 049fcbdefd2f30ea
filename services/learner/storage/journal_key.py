"""Key of a journal: its seals become MACs, so that nobody without the key can forge a record together with its checksums.

record = magic | length | xxh3-64 of the payload | key id | previous record's MAC | MAC | xxh3-64 of all that | payload
         MAC = BLAKE2b-256 under the key, of the previous MAC and the payload
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from services.common.config.settings import Settings
from services.common.errors import ConfigError

ID_BYTES = 8
MAC_BYTES = 32
FIRST = bytes(MAC_BYTES)
"""The previous MAC of the first record."""
MIN_SECRET_BYTES = 16
"""A shorter secret is refused: it could be guessed."""
MAX_SECRET_BYTES = 4096


class Proof(StrEnum):
    """Result of checking a record's seal, with or without a key."""

    CHECKSUM = "checksum"
    """The record has no MAC: anybody may have written it."""
    UNREAD = "unread"
    """The record has a MAC, and the reader has no key to check it."""
    PROVED = "proved"
    FOREIGN = "foreign"
    """The MAC was made with another key."""
    FORGED = "forged"
    """The record names this key, but the MAC is not of this key, or does not follow the previous record."""


@dataclass(frozen=True, slots=True)
class Mac:
    """Seal of a record."""

    key_id: bytes
    previous: bytes
    """MAC of the previous record; where that has none, the BLAKE2b-256 of its payload."""
    value: bytes


@dataclass(frozen=True, slots=True)
class JournalKey:
    """A secret. Only its id is ever printed."""

    _secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key in a file: its bytes without surrounding white space.

        Raises:
            ConfigError: the file cannot be read, or is too short or too long; names the file, never its content.
        """
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"journal key: cannot read {path}: {error.strerror}") from error
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            allowed = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
            raise ConfigError(f"journal key: {path} must hold {allowed} bytes, not {len(secret)}")
        return cls(hashlib.blake2b(secret).digest())

    @property
    def id(self) -> bytes:
        """Identifies this key and reveals nothing else of it."""
        return hashlib.blake2b(key=self._secret, digest_size=ID_BYTES, person=b"millrace key id").digest()

    def seal(self, previous: bytes, payload: bytes) -> Mac:
        """The seal of a record."""
        value = hashlib.blake2b(previous + payload, key=self._secret, digest_size=MAC_BYTES).digest()
        return Mac(self.id, previous, value)

    def prove(self, mac: Mac, payload: bytes, previous: bytes | None) -> Proof:
        """Checks a record against its seal; `previous` is the `tag_of` the record before it, None where that was not read."""
        if mac.key_id != self.id:
            return Proof.FOREIGN
        sealed = self.seal(mac.previous, payload)
        follows = previous is None or hmac.compare_digest(previous, mac.previous)
        return Proof.PROVED if follows and hmac.compare_digest(sealed.value, mac.value) else Proof.FORGED


def journal_key(settings: Settings) -> JournalKey | None:
    """The key that seals new records, or None without one; ConfigError if its file cannot be used."""
    return None if settings.journal_key_file is None else JournalKey.read(settings.journal_key_file)


def tag_of(mac: Mac | None, payload: bytes) -> bytes:
    """The `previous` of the record that follows this one."""
    return hashlib.blake2b(payload, digest_size=MAC_BYTES).digest() if mac is None else mac.value
