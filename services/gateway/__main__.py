"""Entry point `python -m services.gateway`: loads settings, binds, serves until SIGTERM, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from functools import partial

import uvicorn
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from services.common.config.settings import Settings
from services.common.environments.servers import EnvironmentServers
from services.common.errors import ConfigError, SandboxError
from services.common.jobs.restore import Restorer
from services.common.jobs.retention import DAY_S, Policy, Retention
from services.common.redis.connection import connect
from services.common.sandbox.pool import Sandbox
from services.common.service.entry import serve
from services.common.service.preflight import RedisUnavailable, require_redis
from services.gateway.admission.admission import PREPARE, Admission
from services.gateway.app import create_app
from services.gateway.header_deadline import HeaderDeadlineProtocol
from services.gateway.middleware.auth import load_token
from services.gateway.trackers.supervisor import Trackers

log = logging.getLogger("millrace.gateway")

RESTORE_INTERVAL_S = 1.0
RETENTION_INTERVAL_S = 180.0
POOL_WAIT_S = 5.0
"""How long a request waits for a connection to Redis while all are in use."""
MAX_OPEN_FILES = 65_536
"""Soft limit of open files that the gateway sets, as far as the hard limit allows: each connection is one."""


async def run(settings: Settings) -> None:
    """Runs the gateway until it is drained. Raises ConfigError when the token's file, port or Redis cannot be used."""
    token, listener = load_token(settings), _bind(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _log_drained)
    _raise_file_limit(settings)
    redis = connect(settings.redis_url, password=settings.redis_password, pool_wait_s=POOL_WAIT_S)
    # People wait for these answers: after about a second without Redis, instead of ten, the answer is 503.
    redis.set_retry(Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 3))
    await _check_redis(settings)
    sandbox = Sandbox(prepare=[PREPARE], service="gateway-check", log_level=settings.log_level)
    worlds = EnvironmentServers(redis, settings.internal_secret, wait_s=0.0)
    app = create_app(settings, redis, token, admission=Admission(sandbox, settings, worlds))
    context = app.state.context
    followers = Sandbox(service="gateway-tracker", log_level=settings.log_level)
    trackers = Trackers(redis, context.store, settings, context.metrics, followers)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        http=HeaderDeadlineProtocol,
        timeout_keep_alive=75,  # longer than people and proxies keep an idle connection
        timeout_graceful_shutdown=max(1, int(settings.drain_timeout_s)),
    )
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", host, port)
    warming = asyncio.create_task(_warm(sandbox), name="warm")
    server = uvicorn.Server(config)
    loops = [
        asyncio.create_task(_restore_loop(context.restorer), name="restore"),
        asyncio.create_task(context.fetches.loop(), name="fetches"),
        asyncio.create_task(_retention_loop(context.retention, settings), name="retention"),
        asyncio.create_task(trackers.run(), name="trackers"),
    ]
    for loop in loops:
        loop.add_done_callback(partial(_stop_on_failure, server))
    try:
        await server.serve(sockets=[listener])
        for loop in loops:
            if loop.done():
                loop.result()
    finally:
        for task in (*loops, warming):
            task.cancel()
        await asyncio.gather(*loops, warming, return_exceptions=True)
        await context.fetches.close()
        await context.retention.close()
        await sandbox.stop()
        await followers.stop()
        await context.inference.close()
        await worlds.close()
        await redis.aclose()


async def _warm(sandbox: Sandbox) -> None:
    """Imports the checks' dependencies before the first job; if the sandbox does not start, each submission reports that."""
    start = time.monotonic()
    with contextlib.suppress(SandboxError):
        await sandbox.start()
        log.info("the checks of new jobs are loaded, after %.1f s", time.monotonic() - start)


async def _restore_loop(restorer: Restorer) -> None:
    """Consumes the job folders; waits for a second; unblocked by time; produces the job records that Redis has lost."""
    while True:
        try:
            await restorer.restore_lost()
        except RedisError as error:
            log.warning("cannot look after the jobs' records: %s", type(error).__name__)
        await asyncio.sleep(RESTORE_INTERVAL_S)


async def _retention_loop(retention: Retention, settings: Settings) -> None:
    """Consumes the ended jobs; waits for a few minutes; unblocked by time; produces free space, by the settings `MILLRACE_KEEP_…`."""
    days = settings.keep_jobs_days
    policy = Policy(settings.keep_jobs, None if days is None else days * DAY_S, settings.keep_jobs_bytes)
    while True:
        try:
            await retention.sweep()
            for job in await retention.prune(policy):
                log.info("job %s is not kept any longer: %d bytes", job.id, job.size_bytes)
            await retention.archive(settings.keep_in_redis_hours * 3600.0)
        except RedisError as error:
            log.warning("cannot look after the ended jobs: %s", type(error).__name__)
        except OSError as error:
            log.warning("cannot look after the ended jobs: %s", error)
        await asyncio.sleep(RETENTION_INTERVAL_S)


def _stop_on_failure(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """Stops the server when a background task has died, and logs the task's name."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the %s loop died", task.get_name(), exc_info=error)
        server.should_exit = True


async def _check_redis(settings: Settings) -> None:
    """Only logs that Redis does not answer: it may come back. A refused user stays refused: raises ConfigError."""
    try:
        await require_redis(settings.redis_url, settings.redis_password, wait_s=0.0)
    except RedisUnavailable as error:
        log.error("%s", error)  # noqa: TRY400  the message is complete without a traceback


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.bind_host else socket.AF_INET
    try:
        listener = socket.create_server((settings.bind_host, settings.gateway_port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on MILLRACE_BIND_HOST={settings.bind_host}, MILLRACE_GATEWAY_PORT={settings.gateway_port}: "
            f"{error.strerror or error}"
        ) from error
    # Accepted connections inherit the option. asyncio sets it only on sockets created with the protocol's number, and this one is not;
    # without it the second part of each answer waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _raise_file_limit(settings: Settings) -> None:
    """Raises the soft limit of open files: at the limit the process accepts no connection from any client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < 2 * settings.max_event_streams:
        message = "only %d files may be open: too few for %d event streams and as many requests"
        log.warning(message, wanted, settings.max_event_streams)


def _log_drained(number: int, _: object) -> None:
    """Handles the signal that uvicorn raises again after the drain; the default handler would kill the process after a clean exit."""
    log.info("drained after %s", signal.Signals(number).name)


def main() -> None:
    """Entry point."""
    serve("gateway", run)


if __name__ == "__main__":
    main()
