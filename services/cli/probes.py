"""Asks a service's /readyz and /healthz."""

from __future__ import annotations

import httpx

from services.cli.supervisor import Probe

TIMEOUT_S = 2.0


def ready_probe(url: str) -> Probe:
    """Well when GET answers 200; no answer counts as not ready."""

    def probe(_pid: int) -> str | None:
        try:
            return _trouble(httpx.get(url, timeout=TIMEOUT_S, trust_env=False))
        except httpx.HTTPError as error:
            return f"{url} does not answer: {type(error).__name__}"

    return probe


def health_probe(url: str) -> Probe:
    """Unwell only when it says so: a busy process may answer late, and one that died is noticed without asking."""

    def probe(_pid: int) -> str | None:
        try:
            return _trouble(httpx.get(url, timeout=TIMEOUT_S, trust_env=False))
        except httpx.HTTPError:
            return None

    return probe


def _trouble(response: httpx.Response) -> str | None:
    return None if response.status_code == httpx.codes.OK else f"{response.status_code}: {response.text.strip()[:200]}"
