"""How a service's loops end: the first error is the process's, and none of the others is lost."""

from __future__ import annotations

import asyncio
import gc

import pytest

from services.common.service.lifecycle import Drain, run_service


async def test_the_first_error_is_raised_and_those_that_follow_are_logged_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drain = Drain()

    async def breaks() -> None:
        raise ValueError("the cause")

    async def breaks_while_draining() -> None:
        await drain.wait()
        raise KeyError("what came of it")

    with pytest.raises(ValueError, match="the cause"):
        await run_service(drain, {"first": breaks, "second": breaks_while_draining}, drain_timeout_s=5.0)
    gc.collect()
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["loop first died", "loop second died"]
