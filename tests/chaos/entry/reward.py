"""The reward service, with fail points."""

from __future__ import annotations

from services.reward.__main__ import main
from tests.chaos.entry import tamper

if __name__ == "__main__":
    tamper("reward")
    main()
