"""What importing the client takes: httpx, and nothing else that is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BLOCK_ALL_BUT_HTTPX = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first in BLOCKED:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refuse())
import millrace
client = millrace.Client("http://127.0.0.1:1", "token")
try:
    client.jobs()
except millrace.GatewayError as error:
    print(error)
"""


def httpx_and_what_it_needs() -> set[str]:
    todo, found = ["httpx"], set[str]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            todo += [each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


def test_it_is_imported_and_used_with_httpx_alone() -> None:
    allowed = httpx_and_what_it_needs() | {"millrace"}
    named = metadata.packages_distributions().items()
    blocked = sorted(
        name for name, packages in named if not {canonicalize_name(package) for package in packages} & allowed
    )
    assert {"pydantic", "yaml", "psutil", "numpy"} <= set(blocked)
    code = f"BLOCKED = {blocked!r}\n{BLOCK_ALL_BUT_HTTPX}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert "http://127.0.0.1:1 does not answer" in done.stdout
