"""Puts the odd verifiers into a package of their own, which only the processes find that get its environment."""

from __future__ import annotations

import os
from pathlib import Path

from tests import plugin_package

OFFERED = [
    "always_right", "sleep", "endless_regex", "raises", "fails_once", "dies", "exits", "not_a_score", "number", "truth", "nan",
    "eats_memory",
    "shows_environment", "leaves_a_child", "leaves_strangers", "process", "takes_memory", "strict", "declares_nonsense",
    "computes_in_threads",
]  # fmt: skip


def install(folder: Path) -> dict[str, str]:
    """The environment of a process that has the odd verifiers installed, under `odd_<name>`."""
    lines = [f"odd_{name} = odd_verifiers:{name}" for name in OFFERED]
    lines += [
        "gsm8k = odd_verifiers:gsm8k",
        "odd_missing = odd_verifiers:nowhere",
        "odd_broken = no_such_package:verify",
        "odd_slow_import = odd_slow_import:verify",
    ]
    site, module = folder / "site", Path(__file__).with_name("odd_verifiers.py")
    installed = plugin_package.install(site, "odd-verifiers", {"millrace.verifiers": lines}, module)
    (site / "odd_slow_import.py").write_text("import time\ntime.sleep(60)\n")
    return {**os.environ, **installed, "ODD_VERIFIERS_MARK": str(folder / "mark")}
