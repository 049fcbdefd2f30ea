"""Entry point of the rollout service (`python -m services.rollout`): samples the groups of one active job at a time."""

from __future__ import annotations

from services.common.config.settings import Settings
from services.common.service.entry import serve


async def run(settings: Settings) -> None:
    """Runs the service; its imports are not repeated in the engine's processes, which import this module again."""
    from services.rollout.service import run

    await run(settings)


def main() -> None:
    """Entry point."""
    serve("rollout", run)


if __name__ == "__main__":
    main()
