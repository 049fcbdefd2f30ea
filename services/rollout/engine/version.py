"""The policy version that the engine samples with, and waiting for a newer one."""

from __future__ import annotations

import asyncio

from services.common.weights.version import PolicyVersion


class VersionLabel:
    """What the engine's weights are. No version means that they are not known to be any: nothing may be sampled."""

    def __init__(self) -> None:
        """No version."""
        self._version: PolicyVersion | None = None
        self._changed = asyncio.Condition()

    @property
    def version(self) -> PolicyVersion | None:
        """The version whose weights sample the next token."""
        return self._version

    async def change(self, version: PolicyVersion | None) -> None:
        """Puts another label on, and wakes those who wait for it."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def wait_for(self, version: PolicyVersion, timeout_s: float | None = None) -> bool:
        """Waits until the engine holds this version or a newer one; False when it did not within `timeout_s` seconds."""

        def reached() -> bool:
            return self._version is not None and self._version >= version

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(reached)
        except TimeoutError:
            return False
        return True
