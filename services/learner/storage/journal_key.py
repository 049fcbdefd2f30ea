"""Key of a journal: makes its seals MACs, so that nobody without it can write a record anew, checksums and all.

record = magic | length | xxh3-64 of the payload | key id | MAC of the record before | MAC | xxh3-64 of all that | payload
         MAC = BLAKE2b-256 under the key of the MAC before and the payload
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
"""Stands for the MAC before the first record."""

LEAST_BYTES = 16
"""A shorter secret is refused: it could be guessed."""
MOST_BYTES = 4096


class Proof(StrEnum):
    """What a record's seal says, to whoever reads it with or without a key."""

    CHECKSUM = "checksum"
    """It has no MAC: anybody may have written it."""
    UNREAD = "unread"
    """It has a MAC, and no key is here to check it."""
    PROVED = "proved"
    FOREIGN = "foreign"
    """Its MAC was made with another key."""
    FORGED = "forged"
    """It names this key, and its MAC is not of this key, or not of the record before it."""


@dataclass(frozen=True, slots=True)
class Mac:
    """What a sealed record carries."""

    key_id: bytes
    previous: bytes
    """MAC of the record before; of one without, a BLAKE2b-256 of its payload."""
    value: bytes


@dataclass(frozen=True, slots=True)
class JournalKey:
    """A secret. It shows in no text: only its id does."""

    _secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key in a file: its bytes, less white space around them.

        Raises:
            ConfigError: it cannot be read, or is too short or too long; names the file, never what it holds.
        """
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"journal key: cannot read {path}: {error.strerror}") from error
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise ConfigError(f"journal key: {path} must hold {LEAST_BYTES} to {MOST_BYTES} bytes, not {len(secret)}")
        return cls(hashlib.blake2b(secret).digest())

    @property
    def id(self) -> bytes:
        """Tells this key from others, and nothing else of it."""
        return hashlib.blake2b(key=self._secret, digest_size=ID_BYTES, person=b"millrace key id").digest()

    def seal(self, previous: bytes, payload: bytes) -> Mac:
        """The seal of a record."""
        value = hashlib.blake2b(previous + payload, key=self._secret, digest_size=MAC_BYTES).digest()
        return Mac(self.id, previous, value)

    def prove(self, mac: Mac, payload: bytes, before: bytes | None) -> Proof:
        """Whether a record is as this key sealed it; `before` is what the record before it carries, None where that was not read."""
        if mac.key_id != self.id:
            return Proof.FOREIGN
        sealed = self.seal(mac.previous, payload)
        follows = before is None or hmac.compare_digest(before, mac.previous)
        return Proof.PROVED if follows and hmac.compare_digest(sealed.value, mac.value) else Proof.FORGED


def journal_key(settings: Settings) -> JournalKey | None:
    """The key that new records are sealed with, or None without one.

    Raises:
        ConfigError: its file cannot be used.
    """
    return None if settings.journal_key_file is None else JournalKey.read(settings.journal_key_file)


def tag_of(mac: Mac | None, payload: bytes) -> bytes:
    """What the record after this one carries of it."""
    return hashlib.blake2b(payload, digest_size=MAC_BYTES).digest() if mac is None else mac.value
