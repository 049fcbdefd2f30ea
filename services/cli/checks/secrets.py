"""Secret checks: files with secrets are readable by their owner only; an address beyond loopback needs tokens."""

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
    own = [subject.home / name for name in (GATEWAY_TOKEN, INTERNAL_TOKEN, UP_FILE)]
    paths = [settings.token_file, settings.internal_token_file, *own]
    files = sorted({path.resolve() for path in paths if path is not None and path.exists()})
    return [
        *(_check_file(path) for path in files),
        *_check_token(subject, "MILLRACE_TOKEN", settings.token),
        *_check_token(subject, "MILLRACE_INTERNAL_TOKEN", settings.internal_token),
    ]


def _check_file(path: Path) -> Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if not path.read_bytes().strip():
        return problem("secrets", f"{path} is empty", "write the secret into it, or remove it and its setting")
    if mode & 0o077:
        return warning("secrets", f"{path} has mode {mode:03o}: others can read it", f"chmod 600 {path}")
    return ok("secrets", f"{path} is for its owner only")


def _check_token(subject: Subject, name: str, token: SecretStr | None) -> list[Finding]:
    """A problem where an address beyond loopback lacks its token; no finding where the token is optional."""
    try:
        subject.settings.require_token_beyond_loopback(token, name)
    except ConfigError as error:
        file = name.lower()
        remedy = f"openssl rand -hex 32 > {file} && chmod 600 {file} && export {name}_FILE={file}"
        return [problem("secrets", str(error), remedy)]
    return [] if token is None else [ok("secrets", f"{name} is set")]
