"""The files that hold secrets: for their owner only; and a token where others can reach."""

from __future__ import annotations

import stat
from pathlib import Path

from pydantic import SecretStr

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.cli.stack.plan import GATEWAY_TOKEN, INTERNAL_TOKEN
from services.common.errors import ConfigError
from services.common.service.lost_processes import UP_FILE


def check_secrets(subject: Subject) -> list[Finding]:
    """Modes of token files and `up.json`; the tokens that an address beyond loopback needs."""
    settings = subject.settings
    ours = [subject.home / name for name in (GATEWAY_TOKEN, INTERNAL_TOKEN, UP_FILE)]
    named = [settings.token_file, settings.internal_token_file, *ours]
    files = sorted({path.resolve() for path in named if path is not None and path.exists()})
    return [
        *(_file(path) for path in files),
        *_token(subject, "MILLRACE_TOKEN", settings.token),
        *_token(subject, "MILLRACE_INTERNAL_TOKEN", settings.internal_token),
    ]


def _file(path: Path) -> Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if not path.read_bytes().strip():
        return problem("secrets", f"{path} is empty", "write the secret into it, or remove it and its setting")
    if mode & 0o077:
        return warning("secrets", f"{path} has mode {mode:03o}: others can read it", f"chmod 600 {path}")
    return ok("secrets", f"{path} is for its owner only")


def _token(subject: Subject, name: str, token: SecretStr | None) -> list[Finding]:
    """A token that is missing where others can reach; silent where it may be missing."""
    try:
        subject.settings.require_token_beyond_loopback(token, name)
    except ConfigError as error:
        remedy = (
            f"openssl rand -hex 32 > {name.lower()} && chmod 600 {name.lower()} && export {name}_FILE={name.lower()}"
        )
        return [problem("secrets", str(error), remedy)]
    return [] if token is None else [ok("secrets", f"{name} is set")]
