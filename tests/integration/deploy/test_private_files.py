"""What the services write is their user's alone, whatever mask they were started under."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MASK_AFTER = """
import importlib, os, sys
os.umask(0o022)
sys.argv = sys.argv[1:]
try:
    importlib.import_module(sys.argv[0]).main()
except SystemExit:
    pass
print(f"mask {os.umask(0):03o}")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["services.gateway.__main__"],
        ["services.reward.__main__"],
        ["services.environment.__main__"],
        ["services.learner.__main__"],
        ["services.rollout.__main__"],
        ["services.cli.main", "up"],
        ["services.cli.main", "up", "--detach"],
    ],
    ids=" ".join,
)
def test_each_service_and_up_set_their_own_mask_before_anything_else(tmp_path: Path, arguments: list[str]) -> None:
    wrong = {"MILLRACE_HOME": str(tmp_path), "MILLRACE_DRAIN_TIMEOUT_S": "soon"}  # ends each at its settings
    done = subprocess.run(
        [sys.executable, "-c", MASK_AFTER, *arguments],
        env=os.environ | wrong,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "mask 077" in done.stdout, done.stdout + done.stderr
