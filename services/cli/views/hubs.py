"""View of what was fetched from hubs: a table of references, sizes and paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.hubs.choice import show_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from services.common.config.hub_folder import Stored


def print_stored(console: Console, stored: Sequence[Stored]) -> None:
    """One line each, so that a script can cut it too; a remark when there is nothing."""
    if not stored:
        console.print("nothing was fetched from hubs into this home")
        return
    width = max(len(str(item.reference)) for item in stored)
    for item in stored:
        remark = "" if item.whole else "  (not whole: pull it again, or remove it)"
        console.print(f"{item.reference!s:<{width}}  {show_bytes(item.size_bytes):>9}{remark}", soft_wrap=True)
