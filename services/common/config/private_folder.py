"""A directory that only this user may enter: what lies in it needs no guard of its own."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from services.common.errors import ConfigError


def make_private(path: Path) -> None:
    """Makes the directory, and its parents, where it is missing; takes everybody else's rights away where it is not.

    Raises:
        ConfigError: it is a link, no directory, or another user's, who could put there what is not ours.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(path):
        raise ConfigError(f"{path} is not a directory of this user")
    if stat.S_IMODE(path.lstat().st_mode) & 0o077:
        path.chmod(0o700)


def prefix_of(home: Path) -> str:
    """What the names of a home's directories outside of it begin with: two homes on one machine may name their workers alike."""
    return f"millrace-{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:8]}-"


def is_own(path: Path) -> bool:
    """Whether a directory of this user lies there; a link to one is none."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
