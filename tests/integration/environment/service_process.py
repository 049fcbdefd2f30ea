"""An environment service in a process of its own: its arguments are a folder and a token; it prints its port, and serves until its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.common.sandbox.pool import Sandbox
from services.common.service.process_tree import die_with_parent
from services.environment.players import Players
from services.environment.server import EnvironmentService, serving
from tests.integration.environment.odd_package import install

PLACES = 8
IDLE_S = 0.5


async def main(folder: Path, token: str) -> None:
    """Serves the odd environments."""
    async with Sandbox(prepare=["services.environment.player:prepare"], environment=install(folder)) as sandbox:
        await sandbox.start()
        players = Players(sandbox, places=PLACES)
        service = EnvironmentService(players, memory_mib=256)
        async with serving(service, "127.0.0.1", 0, token) as port:
            sys.stdout.write(f"{port} {sandbox.pid}\n")
            sys.stdout.flush()
            while True:
                await asyncio.sleep(IDLE_S)
                await players.end_idle(after_s=IDLE_S)


if __name__ == "__main__":
    import signal

    die_with_parent(signal.SIGKILL)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
