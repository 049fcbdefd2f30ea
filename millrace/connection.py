"""Connection: which gateway is meant where none is named, and its token. The command line finds them in the same way."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import ConfigError

DEFAULT_HOME = ".millrace"


@dataclass(frozen=True, slots=True)
class Address:
    """A gateway and its token."""

    url: str
    token: str | None = field(repr=False)


def find_gateway(
    url: str | None = None, token: str | None = None, home: str | os.PathLike[str] | None = None
) -> Address:
    """The gateway at this URL, or that of the stack in this home; without either MILLRACE_URL's, or that of MILLRACE_HOME (`.millrace`).

    The token, where none is given, is `find_token`'s; a URL's never is the token of a home. Raises ConfigError where no stack runs in the
    home, and for a URL without a scheme.
    """
    if url is None and home is None:
        url = os.environ.get("MILLRACE_URL") or None
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the gateway's URL {url} must begin with http:// or https://")
        return Address(url, token or find_token(None))
    from services.common.service.stack_state import require_state

    state = require_state(Path(home or os.environ.get("MILLRACE_HOME") or DEFAULT_HOME).resolve())
    return Address(state.url, token or find_token(state.token_file))


def find_token(state_file: str | None) -> str | None:
    """MILLRACE_TOKEN, or what MILLRACE_TOKEN_FILE or the running stack's file holds. Raises ConfigError when that cannot be read."""
    if token := os.environ.get("MILLRACE_TOKEN"):
        return token.strip()
    name = os.environ.get("MILLRACE_TOKEN_FILE") or state_file
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"the token file {name} cannot be read: {error.strerror}") from error
