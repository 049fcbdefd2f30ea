"""Seal audit: the records of a journal that a key proves, and those that nothing proves."""

from __future__ import annotations

from services.learner.audit.audit import Audit
from services.learner.audit.report import Breach
from services.learner.storage.journal import BatchRecord
from services.learner.storage.journal_key import JournalKey, Proof

_BREACHES = {
    Proof.FOREIGN: "its MAC was made with another key than the one that was given",
    Proof.FORGED: "its MAC is not of this record after the one before it: it was altered, or records were left out",
}


class SealAudit:
    """Takes every record in order, then `finish`."""

    def __init__(self, audit: Audit, key: JournalKey | None) -> None:
        self._audit, self._key = audit, key
        self._open = 0
        """Records without a MAC."""
        self._unread = 0
        self._sealed = False

    def record(self, where: str, record: BatchRecord) -> None:
        """Checks the next record."""
        proof = record.proof
        if proof is Proof.CHECKSUM and self._sealed:
            self._audit.breach(Breach.SEAL, where, "it has no MAC, and a record before it has one")
        elif proof in _BREACHES:
            self._audit.breach(Breach.SEAL, where, _BREACHES[proof])
        self._open += proof is Proof.CHECKSUM
        self._unread += proof is Proof.UNREAD
        self._audit.report.proved += proof is Proof.PROVED
        self._sealed |= proof is not Proof.CHECKSUM

    def finish(self) -> None:
        """Reports the records that were not proved."""
        report = self._audit.report
        if self._key is not None and report.records and not self._sealed:
            message = "no record has a MAC: the key that was given proves nothing here"
            self._audit.breach(Breach.SEAL, "journal", message)
        elif self._unread:
            report.unproved.append(f"{self._unread} records are sealed with a key: --key-file proves them")
        if self._open:
            without = "that nobody wrote all files anew, checksums included: only a journal key (MILLRACE_JOURNAL_KEY_FILE) proves it"
            report.unproved.append(f"{self._open} records have no MAC: {without}")
