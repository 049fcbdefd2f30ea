"""Every answer of GSM8K's test set, in the forms that models give it in. `MILLRACE_TEST_GSM8K` names the file (test.jsonl)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from benchmarks.verifiers import FORMS, REMARK, responses, rows
from services.reward.verifiers import gsm8k

FILE = Path(os.environ.get("MILLRACE_TEST_GSM8K", ""))
ROWS = 1319

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="MILLRACE_TEST_GSM8K names no file")


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {REMARK}))
def test_each_answer_is_right_in_every_form_and_its_neighbour_wrong(form: str) -> None:
    given = rows(FILE, ROWS)
    assert len(given) == ROWS
    for number, worked in given:
        for reference in (worked, f"{number:f}", f"{number:,f}"):
            assert gsm8k.verify(responses(number)[form], reference, {}).accuracy == 1.0, (number, form)
            assert gsm8k.verify(responses(number + 1)[form], reference, {}).accuracy == 0.0, (number, form)


def test_each_worked_answer_is_right() -> None:
    for number, worked in rows(FILE, ROWS):
        assert gsm8k.verify(worked, f"{number:f}", {}).reward == 1.0
