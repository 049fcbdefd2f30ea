"""`python -m services.reward`: judges the groups of every active job."""

from __future__ import annotations

from services.common.service.entry import serve
from services.reward.service import run


def main() -> None:
    """Entry point."""
    serve("reward", run)


if __name__ == "__main__":
    main()
