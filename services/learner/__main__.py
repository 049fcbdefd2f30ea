"""Entry point of this node's learner agent: `python -m services.learner`."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from prometheus_client.multiprocess import MultiProcessCollector

from services.common.config.settings import Settings
from services.common.redis.connection import connect
from services.common.service.entry import serve
from services.common.service.health import HealthServer
from services.common.service.lifecycle import Drain, run_service
from services.common.service.preflight import require_disk_space, require_memory, require_platform, require_redis
from services.learner.agent.agent import Agent
from services.learner.ranks.launch import Nodes
from services.learner.storage.folder import METRICS_DIR
from services.learner.storage.journal_key import journal_key


async def run(settings: Settings) -> None:
    """Runs the agent until the drain.

    Raises:
        ConfigError: this machine, Redis, the jobs' volume or the metrics port cannot be used with these settings.
    """
    settings.require_token_beyond_loopback(settings.internal_token, "MILLRACE_INTERNAL_TOKEN")
    journal_key(settings)
    require_platform(settings.platform)
    require_memory(settings.min_memory_gib)
    require_disk_space(settings.home / "jobs", settings.min_free_gib)
    drain = Drain()
    drain.on_signals()
    name = Nodes.of(settings).own_name(settings.worker_name("learner"))
    metrics_dir = settings.home.resolve() / METRICS_DIR / name
    shutil.rmtree(metrics_dir, ignore_errors=True)  # left by an earlier agent
    metrics_dir.mkdir(parents=True)
    MultiProcessCollector(REGISTRY, path=str(metrics_dir))  # type: ignore[no-untyped-call]
    export_disk(settings.job_dir("").resolve())
    with HealthServer(settings.bind_host, settings.metrics_port, healthy=lambda: None, ready=lambda: None) as health:
        redis = connect(settings.redis_url, password=settings.redis_password)
        try:
            await require_redis(settings.redis_url, settings.redis_password, wait_s=settings.redis_wait_s)
            agent = Agent(settings, redis, drain, metrics_dir, health.port)
            loops = {"work": agent.work_loop, "beat": agent.beat_loop}
            await run_service(drain, loops, drain_timeout_s=settings.drain_timeout_s + 10)
        finally:
            await redis.aclose()


def export_disk(jobs: Path, registry: CollectorRegistry = REGISTRY) -> None:
    """Registers gauges of the volume that holds the jobs' folder, read at each scrape; creates the folder if it is missing."""
    jobs.mkdir(parents=True, exist_ok=True)
    free = Gauge("millrace_learner_disk_free_bytes", "Room left for journals and checkpoints.", registry=registry)
    size = Gauge("millrace_learner_disk_size_bytes", "Size of the volume that they lie on.", registry=registry)
    free.set_function(lambda: shutil.disk_usage(jobs).free)
    size.set_function(lambda: shutil.disk_usage(jobs).total)


def main() -> None:
    """Entry point."""
    serve("learner", run)


if __name__ == "__main__":
    main()
