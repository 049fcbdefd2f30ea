"""Opens a client of the gateway that a command is about."""

from __future__ import annotations

from pathlib import Path

from services.cli.client import TIMEOUT_S, GatewayClient
from services.cli.tokens import find_token
from services.cli.up import require_state
from services.common.errors import ConfigError


def open_client(home: Path, url: str | None, *, timeout_s: float = TIMEOUT_S) -> GatewayClient:
    """A client of the named gateway, or of this home's.

    Raises:
        ConfigError: the address has no scheme, or nothing is up in this home.
    """
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must begin with http:// or https://")
        return GatewayClient(url, find_token(None), timeout_s=timeout_s)
    state = require_state(home.resolve())
    return GatewayClient(state.url, find_token(state.token_file), timeout_s=timeout_s)
