"""Entry point of a service: the same first steps and exit codes for all of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from services.common.config.settings import Settings, load_settings
from services.common.errors import ConfigError
from services.common.service.lifecycle import freeze_heap
from services.common.service.logs import configure_logging


def serve(service: str, run: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Runs a service to its end: exit code 0 after a drain, 2 for a wrong setting (one line), 1 when a loop died."""
    keep_files_private()
    try:
        settings = load_settings()
        configure_logging(service, settings.log_level)
        freeze_heap()
        asyncio.run(run(settings))
    except ConfigError as error:
        sys.stderr.write(f"{service}: {error}\n")
        sys.exit(2)


def keep_files_private() -> None:
    """Makes files that this process and its children create from now on readable only by its user."""
    os.umask(0o077)
