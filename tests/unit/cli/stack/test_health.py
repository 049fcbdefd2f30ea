"""Probes of services: what they cost the supervisor, and what they find."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from services.cli.stack.children import free_port
from services.cli.stack.health import health_probe, ready_probe
from services.common.errors import DeadlineExceeded
from services.common.service.health import HealthServer


@pytest.fixture
def url() -> Iterator[str]:
    port = free_port()
    with HealthServer("127.0.0.1", port, healthy=lambda: "sick", ready=lambda: None, registry=CollectorRegistry()):
        yield f"http://127.0.0.1:{port}"


def test_a_probe_loads_no_certificates(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("plain HTTP needs none")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", refuse)
    assert ready_probe(f"{url}/readyz")(0) is None
    assert health_probe(f"{url}/healthz")(0) == "503: sick"


def test_what_does_not_answer_is_not_ready_and_has_said_nothing_of_its_health() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert ready_probe(nobody)(0) == f"{nobody} does not answer: ConnectError"
    with pytest.raises(DeadlineExceeded, match="does not answer"):
        health_probe(nobody)(0)
