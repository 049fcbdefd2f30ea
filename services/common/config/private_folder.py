"""Private directories: only this user may enter them, so that their files need no protection of their own."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from services.common.errors import ConfigError


def make_private(path: Path) -> None:
    """Creates the directory with its parents, or removes other users' rights from an existing one.

    Raises:
        ConfigError: it is a link, not a directory, or owned by another user, who could place files in it.
        OSError: it cannot be created.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own_directory(path):
        raise ConfigError(f"{path} is not a directory of this user")
    if stat.S_IMODE(path.lstat().st_mode) & 0o077:
        path.chmod(0o700)


def home_prefix(home: Path) -> str:
    """Prefix of a home's directories outside of it: workers of two homes on one machine may have the same name."""
    return f"millrace-{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:8]}-"


def is_own_directory(path: Path) -> bool:
    """Whether the path is a directory of this user, and not a link to one."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
