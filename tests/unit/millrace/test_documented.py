"""The client's document and its notebook, as they are committed; tests/e2e/test_notebook.py runs the notebook."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import millrace

ROOT = Path(__file__).parents[3]
CELLS: list[dict[str, Any]] = [
    cell
    for cell in json.loads((ROOT / "examples/notebook/first_job.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]
NOTEBOOK = "\n".join("".join(cell["source"]) for cell in CELLS)
DOCUMENT = "\n".join(
    re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
)
OWNERS = {"client": millrace.Client, "job": millrace.Job, "again": millrace.Job, "millrace": millrace}


def test_the_notebook_has_no_outputs() -> None:
    assert not [cell["id"] for cell in CELLS if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.parametrize(("shown", "least"), [(NOTEBOOK, 10), (DOCUMENT, 15)], ids=["notebook", "document"])
def test_what_is_shown_exists_and_takes_the_arguments_that_are_shown(shown: str, least: int) -> None:
    checked = 0
    for node in ast.walk(compile(shown, "shown", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OWNERS:
            assert hasattr(OWNERS[node.value.id], node.attr) or node.attr == "record", node.attr
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            owner = OWNERS.get(node.func.value.id)
            if owner is not None:
                method = getattr(owner, node.func.attr)
                itself = [] if owner is millrace else [None]
                keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(method).bind(*itself, *node.args, **keywords)
                checked += 1
    assert checked >= least
