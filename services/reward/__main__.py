"""`python -m services.reward`: judges the groups of every active job."""

from __future__ import annotations

import asyncio
import logging
import sys

from services.common.config.settings import load_settings
from services.common.errors import ConfigError
from services.common.service.lifecycle import keep_files_private
from services.common.service.logs import configure_logging

log = logging.getLogger("services.reward")


def main() -> int:
    """Exit code: 0 after a drain, 2 for a wrong setting."""
    keep_files_private()
    try:
        settings = load_settings()
        configure_logging("reward", settings.log_level)
        from services.reward.service import run

        asyncio.run(run(settings))
    except ConfigError as error:
        sys.stderr.write(f"millrace reward: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
