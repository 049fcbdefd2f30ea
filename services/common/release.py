"""Which release of Millrace runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed package's version; `unknown` where a source tree runs that is not installed."""
    try:
        return version("millrace")
    except PackageNotFoundError:
        return "unknown"
