"""What people read of a job's ledger."""

from __future__ import annotations

import io

from rich.console import Console

from services.cli.views.proof import print_ledger

SUMS = {"issued": 12, "active": 4, "trained": 4, "degenerate": 0, "stale": 1, "failed": 3, "cancelled": 0}
LEDGER = {
    "source": "journal", "step": 2, "lineage": 1, **SUMS, "failed_reasons": {"[red]why[/red]": 2, "late": 1}, "total": 3,
    "groups": [{"group_id": 6, "fate": "failed", "step": 2, "lineage": 1, "reason": "[red]why[/red]"}],
}  # fmt: skip


def printed(ledger: dict[str, object], *, listed: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_ledger(console, ledger, listed=listed)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_sums_and_reasons_are_shown_and_a_reason_is_never_markup() -> None:
    rows = [line.split() for line in printed(LEDGER).splitlines()]
    for name, count in SUMS.items():
        assert [name, str(count)] in rows
    assert ["2", "×", "[red]why[/red]"] in rows


def test_the_groups_are_listed_where_a_fate_was_asked_for() -> None:
    assert "1 of 3 groups" not in printed(LEDGER)
    text = printed(LEDGER, listed=True)
    assert "1 of 3 groups" in text
    assert ["6", "failed", "2", "[red]why[/red]"] in [line.split() for line in text.splitlines()]


def test_sums_that_are_not_the_journals_are_marked() -> None:
    assert "no journal that the gateway can read" in printed(LEDGER | {"source": "record", "failed_reasons": {}})
