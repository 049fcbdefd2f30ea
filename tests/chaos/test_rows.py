"""Every row of docs/reliability.md's table, at its full count: hours. Run by `make chaos`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.rows import ROWS, Row
from tests.chaos.run import LATE_CODE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(6 * 3600)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command.partition("--fault ")[2])
def test_nothing_is_violated(row: Row) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.chaos.run", *row.arguments, "--record"], check=False)
    assert done.returncode in {0, LATE_CODE}, (
        row.command
    )  # that a job went on late is for the table to tell, with the cause
