"""A Redis that takes no writes is told from its own words."""

from __future__ import annotations

from services.gateway.routes.jobs import writes_refused


def test_redis_refuses_once_a_write_to_its_file_has_failed_and_not_where_it_has_none() -> None:
    assert writes_refused({"aof_enabled": 1, "aof_last_write_status": "err"})
    assert not writes_refused({"aof_enabled": 1, "aof_last_write_status": "ok"})
    assert not writes_refused({"aof_enabled": 0})
