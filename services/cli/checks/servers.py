"""Server checks: Redis (the server that REDIS_URL names, else the embedded one) and the gateway."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from millrace.connection import find_token
from millrace.gateway import GatewayClient, GatewayError
from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.cli.stack.redis import server_binary
from services.common.errors import ConfigError

REDIS_TIMEOUT_S = 3.0
GATEWAY_TIMEOUT_S = 5.0
OLDEST_REDIS = 7
_AOF_REMEDY = "start it with `--appendonly yes`: what is not in a file is lost when it restarts"
_EVICTION_REMEDY = "start it with `--maxmemory-policy noeviction`: a server that evicts loses jobs"


def check_redis(subject: Subject) -> list[Finding]:
    """Reachable, Redis 7 or newer, never evicts (`noeviction`) and is durable (AOF); or an embedded server that runs here."""
    url = os.environ.get("REDIS_URL") or (subject.state.redis_url if subject.state else None)
    password = subject.settings.redis_password
    return _check_server(url, password.get_secret_value() if password else None) if url else [_check_embedded()]


def check_gateway(subject: Subject) -> list[Finding]:
    """Whether jobs can be read from it with this token; nothing to check where none runs."""
    url = subject.url or (subject.state.url if subject.state else None)
    if url is None:
        return [ok("gateway", f"nothing is up in {subject.home}: start it with `millrace up`")]
    try:
        token = find_token(None if subject.url or subject.state is None else subject.state.token_file)
        with GatewayClient(url, token, timeout_s=GATEWAY_TIMEOUT_S) as client:
            total = len(client.jobs())
    except ConfigError as error:
        return [problem("gateway", str(error), "correct MILLRACE_TOKEN_FILE, or give the token as MILLRACE_TOKEN")]
    except GatewayError as error:
        reason, _, remedy = str(error).partition("\n")
        return [problem("gateway", f"{url}: {reason}", remedy or "see its log: `millrace up` names the folder")]
    return [ok("gateway", f"{url} answers and takes the token; jobs listed: {total}")]


def redact_url(url: str) -> str:
    """The address without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{unquote(parts.path)}"


def _check_embedded() -> Finding:
    try:
        binary = server_binary()
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except ConfigError as error:
        return problem("redis", "no server", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        found = f"the embedded server does not run: {error}"
        return problem("redis", found, "set REDIS_URL to a Redis 7 server of yours")
    return ok("redis", f"embedded: {' '.join(done.stdout.split()[:3])}")


def _check_server(url: str, password: str | None) -> list[Finding]:
    timeouts = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
    try:
        with redis.Redis.from_url(url, password=password, retry=Retry(NoBackoff(), 0), **timeouts) as client:
            client.ping()
            return _check_settings(client, redact_url(url))
    except ValueError as error:
        remedy = "write it as redis://[[user]:password@]host:port/0 or unix:///path"
        return [problem("redis", f"REDIS_URL: {error}", remedy)]
    except (AuthenticationError, NoPermissionError) as error:
        remedy = "give this user's password in MILLRACE_REDIS_PASSWORD_FILE, or in REDIS_URL"
        return [problem("redis", f"{redact_url(url)} refuses the user: {error}".rstrip("."), remedy)]
    except RedisError as error:
        remedy = "start it, or correct REDIS_URL; unset it to use the embedded server"
        return [problem("redis", f"{redact_url(url)} does not answer: {error}".rstrip("."), remedy)]


def _check_settings(client: redis.Redis, address: str) -> list[Finding]:
    version = "?"
    with suppress(ResponseError):
        version = str(client.info("server").get("redis_version", "?"))
    findings = [ok("redis", f"{address}, version {version}")]
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST_REDIS:
        findings = [
            problem("redis", f"{address} is version {version}", f"use Redis {OLDEST_REDIS} or newer, or Valkey")
        ]
    for name, wanted, remedy, report in (
        ("maxmemory-policy", "noeviction", _EVICTION_REMEDY, problem),
        ("appendonly", "yes", _AOF_REMEDY, warning),
    ):
        try:
            value = client.config_get(name).get(name)
        except ResponseError:
            findings.append(warning(f"redis {name}", "this user may not ask", f"see to it that it is `{wanted}`"))
            continue
        found = value.decode() if isinstance(value, bytes) else str(value)
        findings.append(ok(f"redis {name}", found) if found == wanted else report(f"redis {name}", found, remedy))
    return findings
