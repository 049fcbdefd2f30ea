"""`python -m services.rollout`: samples the groups of one active job at a time."""

from __future__ import annotations

import asyncio

from services.common.config.settings import load_settings
from services.common.errors import ConfigError
from services.common.service.lifecycle import keep_files_private, refuse_to_start
from services.common.service.logs import configure_logging


def main() -> None:
    """Ends with code 0 after a drain, 2 for a wrong setting, 1 when a loop died: the supervisor starts it again."""
    keep_files_private()
    try:
        settings = load_settings()
        configure_logging("rollout", settings.log_level)
        from services.rollout.service import run

        asyncio.run(run(settings))
    except ConfigError as error:
        refuse_to_start("rollout", error)


if __name__ == "__main__":  # the engine's processes import this module again
    main()
