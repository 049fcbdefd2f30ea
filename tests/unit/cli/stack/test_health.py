"""Probes of services: what they cost the supervisor, and what they find."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from services.cli.stack.children import free_port
from services.cli.stack.health import Prober, http_probe
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
    assert http_probe(f"{url}/readyz", 2.0)(0) is None
    assert http_probe(f"{url}/healthz", 2.0)(0) == "503: sick"


def test_what_does_not_answer_is_not_ready_and_has_said_nothing_of_its_health() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    probe = http_probe(nobody, 2.0)
    with pytest.raises(DeadlineExceeded, match="does not answer"):
        probe(0)
    prober = Prober(0, probe, 0.01)
    began, deadline = prober.answered_at, time.monotonic() + 20
    while prober.complaint != f"{nobody} does not answer: ConnectError":
        assert time.monotonic() < deadline, prober.complaint
        time.sleep(0.01)
    prober.stop()
    assert (prober.answered_at, prober.complaints_in_a_row) == (began, 0)
