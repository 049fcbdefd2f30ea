"""View of models and data files: a line each, so that a script can cut it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.hubs.choice import show_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from services.common.catalog import CatalogEntry
    from services.common.config.hub_folder import Stored

_TORN = "(not whole: pull it again, or remove it)"


def print_stored(console: Console, stored: Sequence[Stored]) -> None:
    """References and sizes of what was fetched; a remark when there is nothing."""
    if not stored:
        console.print("nothing was fetched from hubs into this home")
        return
    _print(console, [(str(item.reference), item.size_bytes, "" if item.whole else _TORN) for item in stored])


def print_models(console: Console, models: Sequence[CatalogEntry], partial: Sequence[Stored]) -> None:
    """Names, sizes and architectures of the models that jobs may name, then what interrupted fetches have left."""
    lines = [(model.name, model.size_bytes, model.architecture) for model in models]
    lines += [(str(item.reference), item.size_bytes, _TORN) for item in partial]
    if not lines:
        console.print(
            "there is no model yet: `millrace models tiny` makes the demo's, `add` copies a directory, `pull` fetches"
        )
    else:
        _print(console, lines)


def _print(console: Console, lines: Sequence[tuple[str, int, str]]) -> None:
    width = max(len(name) for name, _, _ in lines)
    for name, size, remark in lines:
        console.print(f"{name:<{width}}  {show_bytes(size):>9}  {remark}".rstrip(), soft_wrap=True)
