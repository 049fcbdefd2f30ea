"""Deaths of rollout servers, as the job's head counts them: a job whose servers cannot stay alive fails with their newest cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.jobs.deaths import Death

MOST_LOADING = 2
"""Deaths of servers that never got as far as sampling for the job."""
MOST = 4
"""Deaths in all."""


class DeathCount:
    """The deaths since a group came from any server."""

    def __init__(self) -> None:
        """Those that are there at the first look are not counted: the head that saw them has ended, and with it what they say."""
        self._known: set[Death] | None = None
        self._counted: list[Death] = []
        self._arrived = 0

    def look(self, deaths: Iterable[Death], arrived: int) -> None:
        """Counts those that are new.

        Args:
            deaths: the newest ones, oldest first.
            arrived: groups that have come so far. Where there are more than at the last look, their order with the deaths of that time is
                not known, and none of these counts.
        """
        known, found, before = self._known, list(deaths), self._arrived
        self._known, self._arrived = set(found), arrived
        if known is None:
            return
        if arrived != before:
            self._counted.clear()
        else:
            self._counted += [death for death in found if death not in known]

    @property
    def verdict(self) -> str:
        """Why the job's servers do not stay alive, with the newest cause; empty while they may."""
        loading = [death for death in self._counted if death.loading]
        if len(loading) >= MOST_LOADING:
            return f"the engine does not start with this model: {loading[-1].cause} ({len(loading)} times in a row)"
        if len(self._counted) >= MOST:
            return f"rollout servers die while they serve the job: {self._counted[-1].cause} ({len(self._counted)} times in a row)"
        return ""
