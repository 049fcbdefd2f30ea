"""`python -m services.environment`: plays the episodes of rollout servers."""

from __future__ import annotations

from services.common.service.entry import serve
from services.environment.service import run


def main() -> None:
    """Entry point."""
    serve("environment", run)


if __name__ == "__main__":
    main()
