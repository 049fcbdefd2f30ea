"""Rollout servers in one process: each the real service with a name, connections and a heartbeat of its own; the engine is scripted.

    python -m benchmarks.simulated.servers HOME REDIS_URL STAGES FIRST COUNT SECONDS TOKENS

STAGES: directory below which they stage weights. SECONDS: what sampling a group takes. Prints, whenever a line comes on its input, what it
has measured since the line before, as JSON. Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from services.common.config.settings import Settings
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.service.logs import configure_logging
from services.common.service.process_tree import die_with_parent
from services.common.service.worker import worker_process
from services.common.streams.consumer import Consumer, Entry
from services.common.streams.stream import MAX_STREAM_LENGTH
from services.common.weight_sync.staging import StagedWeights
from services.common.weights.channel import CLIENT_OPTIONS
from services.rollout import session
from services.rollout.engine import engine as engine_module
from services.rollout.engine.types import Piece
from services.rollout.engine.update import Activation
from services.rollout.service import RolloutService
from services.rollout.session import Wiring
from tests.chaos.scripted import script
from tests.chaos.scripted.engine import ScriptedEngine, ScriptedPrompts

log = logging.getLogger(__name__)

_THREADS = 64


class Measured:
    """What the servers of this process have done since the last `take`."""

    def __init__(self) -> None:
        self.hops: list[float] = []
        """Seconds of each call that sends a group on."""
        self.activated: dict[int, list[float]] = {}
        """Version → monotonic times at which servers had it in use."""

    def take(self) -> str:
        """All of it as one line of JSON, and begins anew."""
        line = json.dumps({"hops": self.hops, "activated": self.activated})
        self.hops, self.activated = [], {}
        return line


MEASURED = Measured()


class TimedConsumer(Consumer):
    """The services' consumer, timed."""

    async def hop(self, entry: Entry, stage: Stage, payload: bytes, *, bound: int = MAX_STREAM_LENGTH) -> bool:
        """Moves the entry."""
        began = time.perf_counter()
        done = await super().hop(entry, stage, payload, bound=bound)
        MEASURED.hops.append(time.perf_counter() - began)
        return done


class WholeEngine(ScriptedEngine):
    """Gives whole responses after a fixed time; half of each group are right, so that every group is informative."""

    seconds = 0.0
    tokens = 0

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int, shared: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """One piece for each rollout."""
        del prompt_token_ids, temperature, max_tokens, shared
        self.requests += count
        try:
            await asyncio.sleep(self.seconds)
            version = self._require_version()
            self.progress_at, self.sampled = time.monotonic(), True
            for index in range(count):
                token_ids = [ord("0") + (index + position) % 10 for position in range(self.tokens - 1)]
                token_ids.append(ord("0") + index % 2)
                yield Piece(index, token_ids, [script.logprob(token) for token in token_ids], version.n, "stop")
        finally:
            self.requests -= count

    async def activate(self, staged: StagedWeights) -> Activation:
        """Changes the weights, and notes when."""
        done = await super().activate(staged)
        MEASURED.activated.setdefault(done.version.n, []).append(time.monotonic())
        return done


async def serve(settings: Settings) -> None:
    """One server, for ever."""
    drain = Drain()
    async with (
        worker_process(settings, "rollout", drain) as worker,
        aclosing(WholeEngine(settings.platform)) as engine,
    ):
        wiring = Wiring(worker.commands, worker.blocking, engine, settings, worker.name, drain, worker.fence)
        service = RolloutService(wiring)
        await asyncio.gather(service.attach(), service.heartbeat())


async def main() -> None:
    """Runs the servers until the input ends."""
    home, url, stages, first, count, seconds, tokens = sys.argv[1:]
    WholeEngine.seconds, WholeEngine.tokens = float(seconds), int(tokens)
    # Servers on machines of their own share no connection.
    CLIENT_OPTIONS.append(("grpc.use_local_subchannel_pool", 1))
    vars(engine_module)["PromptProcess"] = ScriptedPrompts
    vars(session)["Consumer"] = TimedConsumer
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    servers = []
    for number in range(int(first), int(first) + int(count)):
        settings = Settings(
            home=Path(home),
            REDIS_URL=url,
            worker=f"rollout-{number}",
            shared_memory=Path(stages),  # type: ignore[call-arg]
        )
        servers.append(asyncio.create_task(serve(settings), name=f"rollout-{number}"))
    orders = asyncio.create_task(answer())
    done, _ = await asyncio.wait([orders, *servers], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def answer() -> None:
    """Prints what was measured, once for each line of the input."""
    while await asyncio.to_thread(sys.stdin.readline):
        print(MEASURED.take(), flush=True)


if __name__ == "__main__":
    die_with_parent()
    configure_logging("rollout", "WARNING")
    try:
        asyncio.run(main())
    except BaseException:
        log.exception("a server ended")
        os._exit(1)
    os._exit(0)  # at once: the whole home is thrown away
