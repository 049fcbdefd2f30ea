"""Answer of a job's policy in a conversation, as it arrives from the OpenAI-compatible path."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Self

from millrace.records import JsonObject

Messages = str | Sequence[Mapping[str, str]]
"""What the user says, or a conversation: [{"role": "user", "content": "2 + 3 ="}]."""


class ChatAnswer:
    """One answer. Iterating gives its text in pieces, as they arrive; what is known of it stands in the attributes.

    Raises GatewayError where it breaks off.
    """

    def __init__(self, chunks: Generator[JsonObject, None, None]) -> None:
        """`chunks`: of `GatewayClient.chat`."""
        self.text = ""
        """What has arrived."""
        self.finish_reason: str | None = None
        """`stop` or `length`; None until it is whole."""
        self.policy_version: dict[str, int] | None = None
        """`min` and `max`, the oldest and the newest version that sampled it; None until it is whole."""
        self._chunks = chunks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks:
            (choice,) = chunk["choices"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.policy_version = chunk.get("policy_version") or self.policy_version
            if piece := str(choice["delta"].get("content") or ""):
                self.text += piece
                yield piece

    def read(self) -> str:
        """The whole text, when it is there."""
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Stops the answer; closing twice is closing once."""
        self._chunks.close()
