"""Asks a service's /readyz and /healthz."""

from __future__ import annotations

import httpx

from services.cli.asker import Probe
from services.common.errors import DeadlineExceeded

READY_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 4.0


def ready_probe(url: str) -> Probe:
    """Well when GET answers 200; no answer counts as not ready."""

    def probe(_pid: int) -> str | None:
        try:
            return _trouble(url, READY_TIMEOUT_S)
        except httpx.HTTPError as error:
            return f"{url} does not answer: {type(error).__name__}"

    return probe


def health_probe(url: str) -> Probe:
    """Unwell only when it says so; DeadlineExceeded when it says nothing."""

    def probe(_pid: int) -> str | None:
        try:
            return _trouble(url, HEALTH_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise DeadlineExceeded(f"{url} does not answer: {type(error).__name__}") from error

    return probe


def _trouble(url: str, timeout_s: float) -> str | None:
    """What the answer to GET complains of. No certificates are loaded: plain HTTP needs none, and they take 40 ms and memory each time."""
    response = httpx.get(url, timeout=timeout_s, trust_env=False, verify=False)  # noqa: S501  plain HTTP
    return None if response.status_code == httpx.codes.OK else f"{response.status_code}: {response.text.strip()[:200]}"
