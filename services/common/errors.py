"""Errors of Millrace. `MillraceError` is the root of all; a `ConfigError` is one that its user can correct."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class MillraceError(Exception):
    """Root of all errors that Millrace raises itself."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct."""

    field: str
    """Dotted path in the job spec or the request; empty where the message names a setting or a file."""
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` with the known names close to a wrong one, or an empty text: the end of many a problem's message."""
    matches = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(matches)}?" if matches else ""


class ConfigError(MillraceError):
    """A setting, a job spec or a file that its user can correct; each problem names the field, the setting or the file."""

    def __init__(self, *problems: Problem | str, field: str = "") -> None:
        """A text in `problems` is a problem's message; `field` is the field of all such texts."""
        self.problems = tuple(item if isinstance(item, Problem) else Problem(field, item) for item in problems)
        super().__init__("\n".join(map(str, self.problems)))


class ModelError(ConfigError):
    """A model directory that is missing, unsafe (remote code, pickles) or does not fit the settings."""


class DataError(ConfigError):
    """A dataset that is missing, empty or broken; the message names the file and, where known, the row."""


class HubRefused(ConfigError):  # noqa: N818  a refusal
    """A hub's model or data file that cannot be had or may not be used; another try does not help."""


class HubError(MillraceError):
    """A hub does not answer, or broke off; what was fetched is kept, and the next try goes on from there."""


class EntryError(MillraceError):
    """A stream entry that cannot be decoded; a retry cannot help, so it is dead-lettered at once."""


class StreamFull(MillraceError):  # noqa: N818  a state of the stream
    """A bounded stream refused an entry; nothing changed, and the producer waits."""


class WeightSyncError(MillraceError):
    """A weight transfer failed or did not pass verification; no part of it was activated."""


class JobConflict(MillraceError):  # noqa: N818  maps to HTTP 409
    """A change of a job's state that its current state does not allow."""


class RecordGone(MillraceError):  # noqa: N818  an event
    """Redis has lost a running job's record (flushed, or restored to an older state), and it cannot be restored."""


class Fenced(MillraceError):  # noqa: N818  the term of distributed locks
    """A newer process writes for the job; this one may not write any more, and exits."""


class LetterRefused(MillraceError):  # noqa: N818  maps to HTTP 409
    """A dead letter cannot be put back on its stream; the message contains the reason."""


class KeyReused(MillraceError):  # noqa: N818  a refusal
    """An Idempotency-Key was used before with another spec; nothing was created."""


class DeadlineExceeded(MillraceError):  # noqa: N818  the name gRPC uses for the same thing
    """A wait reached its deadline; the message names what was awaited."""


class PromptError(MillraceError):
    """A prompt that the model's chat template or tokenizer refuses, or that is too long; only its group fails."""


class VerifierError(MillraceError):
    """A verifier's infrastructure failed (its process died, it raised); never counts as a wrong answer."""


class ProgramError(MillraceError):
    """A program that a model wrote could not be run: it is not allowed, not isolated, or its runner failed; not a fault of the program."""


class EnvironmentUnavailable(MillraceError):  # noqa: N818  the name gRPC uses for the same thing
    """What an environment needs is away or full for the moment; its episode may be begun again a little later."""


class TrackerError(MillraceError):
    """A tracker did not take a batch of points; the message is its client's, without keys. The same points are sent again."""


class SandboxError(MillraceError):
    """Work in a child process failed: it raised an error other than a MillraceError, or no child can be started."""


class ChildTimeout(SandboxError):  # noqa: N818  an event
    """Work in a child process passed its time limit; the child was killed."""


class ChildDied(SandboxError):  # noqa: N818  an event
    """Work in a child process passed a limit other than time, or ended its process."""


class ChildLost(SandboxError):  # noqa: N818  an event
    """The child process was ended from outside, not by its work: the same work may be tried again."""
