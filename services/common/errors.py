"""The exceptions of Millrace.

MillraceError
├── ConfigError          a setting, a job spec or a file that a person can mend
│   ├── ModelError       a model directory that is missing, unsafe or does not fit
│   └── DataError        a dataset that is missing, empty or broken (names file and row)
├── EntryError           a stream entry that cannot be decoded: goes to the dead-letter stream
├── StreamFull           a bounded stream refused an entry: the producer waits
├── WeightSyncError      a weight transfer that failed verification or broke off
├── JobConflict          a job state change that is not allowed
├── RecordGone           Redis has lost a running job's record, and it cannot be restored
├── Fenced               a newer process writes for the job: this one must end
├── LetterRefused        a dead letter that cannot be put back
├── KeyReused            an Idempotency-Key that stands for another spec
├── DeadlineExceeded     a wait that ended at its deadline (names what it waited for)
├── PromptError          a prompt that a model's chat template or tokenizer does not take (its group fails)
├── VerifierError        a verifier's infrastructure failed (never a wrong answer)
└── SandboxError         work in a child process failed: it raised something, or there is no child to be had
    ├── ChildTimeout     it took longer than it may
    ├── ChildDied        it needed more than it may have, or its process ended
    └── ChildLost        its process was ended from outside: the same work may be tried again
"""

from __future__ import annotations

from dataclasses import dataclass


class MillraceError(Exception):
    """Root of all errors that Millrace raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that a person can mend."""

    field: str
    """Of the job spec or the request, as a dotted path; empty where the message names a setting or a file."""
    message: str

    def __str__(self) -> str:
        """`field: message`."""
        return f"{self.field}: {self.message}" if self.field else self.message


class ConfigError(MillraceError):
    """A setting, a job spec or a file that a person can mend; each problem names the field, the setting or the file."""

    def __init__(self, *problems: Problem | str, field: str = "") -> None:
        """Reports one or several problems.

        Args:
            problems: each of them; a text is the problem's message.
            field: of the problems that are texts.
        """
        self.problems = tuple(item if isinstance(item, Problem) else Problem(field, item) for item in problems)
        super().__init__("\n".join(map(str, self.problems)))


class ModelError(ConfigError):
    """A model directory that is missing, unsafe (remote code, pickles) or does not fit the settings."""


class DataError(ConfigError):
    """A dataset that is missing, empty or broken; the message names the file and, where known, the row."""


class EntryError(MillraceError):
    """A stream entry that cannot be decoded; trying again cannot help, so it is dead-lettered at once."""


class StreamFull(MillraceError):  # noqa: N818  the word that Redis people use for it
    """A bounded stream refused an entry; nothing was changed and the producer waits."""


class WeightSyncError(MillraceError):
    """A weight transfer broke off or failed verification; nothing of it was activated."""


class JobConflict(MillraceError):  # noqa: N818  maps to HTTP 409
    """A change of a job's state that its present state does not allow."""


class RecordGone(MillraceError):  # noqa: N818  what has happened
    """Redis has lost a running job's record (it was emptied, or put back to an older state), and nothing restored it."""


class Fenced(MillraceError):  # noqa: N818  the word for it
    """A newer process has begun to write for the job; this one may not write any more, and ends."""


class LetterRefused(MillraceError):  # noqa: N818  maps to HTTP 409
    """A dead letter cannot be put back on its stream; the message says why."""


class KeyReused(MillraceError):  # noqa: N818  what went wrong, in a word
    """An Idempotency-Key was used before with another spec; nothing was created."""


class DeadlineExceeded(MillraceError):  # noqa: N818  the name gRPC uses for the same thing
    """A wait ended at its deadline; the message names what was waited for."""


class PromptError(MillraceError):
    """A prompt that the model's chat template or tokenizer refuses, or that is too long; the group fails, nothing else."""


class VerifierError(MillraceError):
    """A verifier's infrastructure failed (its process died, it raised); never to be read as a wrong answer."""


class SandboxError(MillraceError):
    """Work in a child process failed: it raised something that is no error of ours, or there is no child to be had."""


class ChildTimeout(SandboxError):  # noqa: N818  what happened
    """Work in a child process took longer than it may; the child was killed."""


class ChildDied(SandboxError):  # noqa: N818  what happened
    """Work in a child process needed more than it may have, or ended its process."""


class ChildLost(SandboxError):  # noqa: N818  what happened
    """The child process was ended from outside, by no doing of its work: the same work may be tried again."""
