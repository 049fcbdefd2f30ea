"""The Redis server: the one that REDIS_URL names, else the embedded one."""

from __future__ import annotations

import os
import subprocess
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.cli.stack.redis import server_binary
from services.common.errors import ConfigError

TIMEOUT_S = 3.0
OLDEST = 7
_DURABLE = "start it with `--appendonly yes`: what is not in a file is lost when it restarts"
_KEEPS = "start it with `--maxmemory-policy noeviction`: a server that evicts loses jobs"


def check_redis(subject: Subject) -> list[Finding]:
    """Reachable, Redis 7 or newer, keeps everything (`noeviction`) and durably (AOF); or an embedded server that runs here."""
    url = os.environ.get("REDIS_URL") or (subject.state.redis_url if subject.state else None)
    password = subject.settings.redis_password
    return _server(url, password.get_secret_value() if password else None) if url else [_embedded()]


def _embedded() -> Finding:
    try:
        binary = server_binary()
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except ConfigError as error:
        return problem("redis", "no server", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return problem(
            "redis", f"the embedded server does not run: {error}", "set REDIS_URL to a Redis 7 server of yours"
        )
    return ok("redis", f"embedded: {' '.join(done.stdout.split()[:3])}")


def _server(url: str, password: str | None) -> list[Finding]:
    try:
        with redis.Redis.from_url(
            url,
            password=password,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            client.ping()
            return _qualities(client, shown(url))
    except ValueError as error:
        return [
            problem("redis", f"REDIS_URL: {error}", "write it as redis://[[user]:password@]host:port/0 or unix:///path")
        ]
    except (AuthenticationError, NoPermissionError) as error:
        remedy = "give this user's password in MILLRACE_REDIS_PASSWORD_FILE, or in REDIS_URL"
        return [problem("redis", f"{shown(url)} refuses the user: {error}".rstrip("."), remedy)]
    except RedisError as error:
        remedy = "start it, or correct REDIS_URL; unset it to use the embedded server"
        return [problem("redis", f"{shown(url)} does not answer: {error}".rstrip("."), remedy)]


def _qualities(client: redis.Redis, address: str) -> list[Finding]:
    version = str(_info(client).get("redis_version", "?"))
    findings = [ok("redis", f"{address}, version {version}")]
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST:
        findings = [problem("redis", f"{address} is version {version}", f"use Redis {OLDEST} or newer, or Valkey")]
    for name, wanted, remedy, judge in (
        ("maxmemory-policy", "noeviction", _KEEPS, problem),
        ("appendonly", "yes", _DURABLE, warning),
    ):
        try:
            value = client.config_get(name).get(name)
        except ResponseError:
            findings.append(warning(f"redis {name}", "this user may not ask", f"see to it that it is `{wanted}`"))
            continue
        known = value.decode() if isinstance(value, bytes) else str(value)
        findings.append(ok(f"redis {name}", known) if known == wanted else judge(f"redis {name}", known, remedy))
    return findings


def _info(client: redis.Redis) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.info("server")
    except ResponseError:
        return {}
    return found


def shown(url: str) -> str:
    """The address without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{unquote(parts.path)}"
