"""The full rows take hours: they run when they are asked for by their mark, not because somebody named their file."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips them unless an expression of marks says otherwise."""
    if not config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("chaos"):
                item.add_marker(pytest.mark.skip(reason="takes hours: make chaos, or -m chaos"))
