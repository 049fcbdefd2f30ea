"""Where the commands find the gateway's token."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.errors import ConfigError


def find_token(state_file: str | None) -> str | None:
    """MILLRACE_TOKEN, else the file that MILLRACE_TOKEN_FILE names, else the running stack's; None when there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if token := os.environ.get("MILLRACE_TOKEN"):
        return token.strip()
    name = os.environ.get("MILLRACE_TOKEN_FILE") or state_file
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"the token file {name} cannot be read: {error.strerror}") from error
