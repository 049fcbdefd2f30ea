"""`python -m services.learner`: the learner agent of this machine."""

from __future__ import annotations

import asyncio

from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector

from services.common.connection import connect
from services.common.errors import ConfigError
from services.common.health import HealthServer
from services.common.lifecycle import Drain, refuse_to_start, run_service
from services.common.logs import configure_logging
from services.common.settings import Settings, load_settings
from services.learner.agent import Agent
from services.learner.folder import METRICS_DIR


async def serve(settings: Settings) -> None:
    """Runs the agent until the drain."""
    drain = Drain()
    drain.on_signals()
    metrics_dir = settings.home.resolve() / METRICS_DIR / settings.worker_name("learner")
    metrics_dir.mkdir(parents=True, exist_ok=True)
    MultiProcessCollector(REGISTRY, path=str(metrics_dir))  # type: ignore[no-untyped-call]
    health = HealthServer(settings.bind_host, settings.metrics_port, healthy=lambda: None, ready=lambda: None)
    health.start()
    redis = connect(settings.redis_url)
    agent = Agent(settings, redis, drain, metrics_dir, health.port)
    try:
        loops = {"work": agent.work_loop, "beat": agent.beat_loop}
        await run_service(drain, loops, drain_timeout_s=settings.drain_timeout_s + 10)
    finally:
        await redis.aclose()
        health.stop()


def main() -> None:
    """Entry point: exit code 2 for a wrong setting."""
    try:
        settings = load_settings()
        settings.require_token_beyond_loopback(settings.internal_token, "MILLRACE_INTERNAL_TOKEN")
    except ConfigError as error:
        refuse_to_start("learner", error)
    configure_logging("learner", settings.log_level)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
