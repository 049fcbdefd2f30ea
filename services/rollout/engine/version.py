"""Version label: the policy version that the engine samples with, and a wait for a newer one."""

from __future__ import annotations

import asyncio

from services.common.weights.version import PolicyVersion


class VersionLabel:
    """Policy version of the engine's weights; None while they are not known to be any version: then nothing may be sampled."""

    def __init__(self) -> None:
        self._version: PolicyVersion | None = None
        self._changed = asyncio.Condition()

    @property
    def version(self) -> PolicyVersion | None:
        """The version whose weights sample the next token."""
        return self._version

    async def change(self, version: PolicyVersion | None) -> None:
        """Sets the version, and wakes all waiters."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def wait_for(self, version: PolicyVersion, timeout_s: float | None = None) -> bool:
        """Waits until the engine has this version or a newer one; False when it has not within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._version is not None and self._version >= version)
        except TimeoutError:
            return False
        return True
