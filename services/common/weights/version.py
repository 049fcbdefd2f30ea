"""Policy version: identifies the weights that sampled a token, or that will sample."""

from __future__ import annotations

from typing import NamedTuple, Self

from services.common.pb import weight_sync_pb2 as pb


class PolicyVersion(NamedTuple):
    """A version of a job's policy; later ones compare greater."""

    lineage: int
    """Rises when the learner restarts with an older version than it had published."""
    n: int
    """Optimizer steps."""

    def __str__(self) -> str:
        return f"({self.lineage}, {self.n})"

    @classmethod
    def of(cls, message: pb.Version) -> Self:
        """From the wire."""
        return cls(message.lineage, message.n)

    def message(self) -> pb.Version:
        """For the wire."""
        return pb.Version(lineage=self.lineage, n=self.n)
