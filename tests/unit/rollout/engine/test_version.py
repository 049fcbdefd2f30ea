"""Waiting for a policy version."""

from __future__ import annotations

import asyncio

from services.common.weights.snapshot import PolicyVersion
from services.rollout.engine.update import VersionLabel


async def test_a_waiter_is_woken_by_the_version_or_a_newer_one() -> None:
    label = VersionLabel()
    exact = asyncio.create_task(label.wait_for(PolicyVersion(1, 3), 5))
    older = asyncio.create_task(label.wait_for(PolicyVersion(1, 2), 5))
    other = asyncio.create_task(label.wait_for(PolicyVersion(2, 0), 0.2))
    await asyncio.sleep(0.01)
    await label.change(PolicyVersion(1, 1))
    await asyncio.sleep(0.01)
    assert not exact.done()
    assert not older.done()
    await label.change(PolicyVersion(1, 3))
    assert await exact
    assert await older
    assert not await other


async def test_a_new_lineage_is_newer_than_any_version_of_the_old_one() -> None:
    label = VersionLabel()
    await label.change(PolicyVersion(2, 0))
    assert await label.wait_for(PolicyVersion(1, 99), 0)


async def test_without_a_version_nothing_is_reached() -> None:
    label = VersionLabel()
    await label.change(PolicyVersion(1, 1))
    await label.change(None)
    assert not await label.wait_for(PolicyVersion(0, 0), 0.01)
