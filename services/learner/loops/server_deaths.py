"""Deaths of rollout servers, counted by the job's head: a job whose servers cannot stay alive fails with the newest cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.jobs.deaths import Death

MAX_LOADING = 2
"""Deaths of servers that never sampled for the job."""
MAX_DEATHS = 4


class DeathCount:
    """Deaths since a group came from any server; those of the first call belong to an earlier head and are not counted."""

    def __init__(self) -> None:
        self._known: set[Death] | None = None
        self._counted: list[Death] = []
        self._arrived = 0

    def update(self, deaths: Iterable[Death], arrived: int) -> None:
        """Counts the new ones among the newest `deaths`, given oldest first.

        `arrived`: groups that have arrived so far. Deaths since the last call do not count if groups arrived too: their order is unknown.
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
        """Why the job's servers do not stay alive, with the newest cause; empty below both bounds."""
        loading = [death for death in self._counted if death.loading]
        if len(loading) >= MAX_LOADING:
            return f"the engine does not start with this model: {loading[-1].cause} ({len(loading)} times in a row)"
        if (count := len(self._counted)) >= MAX_DEATHS:
            return f"rollout servers die while they serve the job: {self._counted[-1].cause} ({count} times in a row)"
        return ""
