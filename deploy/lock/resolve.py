"""Locks for every machine that Millrace runs on, each in one file:  resolve.py <uv> <output> [arguments of uv pip compile].

Each environment (Python 3.11 and 3.12, Linux on x86-64 and on Arm) is resolved for itself. A package has one version in all of them, or
this fails; one that only some need carries a marker. uv's own `--universal` reads the metadata of one wheel of a package, whatever its
platform, and so loses what intel-openmp's wheel for Linux asks for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
LOCK = FOLDER / "cpu.txt"
CPU_BUILD = "+cpu"
"""PyTorch's own index has the CPU builds, which PyPI has not: versions are resolved without it, and it is added in the end."""
CUDA = re.compile(r"(nvidia|cuda)-")
"""Packages that PyPI's builds of torch ask for, and the CPU builds do not."""


class Environment(NamedTuple):
    """Where a lock is installed."""

    python: str
    machine: str


ENVIRONMENTS = [Environment(python, machine) for machine in ("x86_64", "aarch64") for python in ("3.11", "3.12")]


def main(uv: str, output: Path, arguments: list[str]) -> None:
    """Writes the lock; the versions that it has are kept where they still fit."""
    before = output.read_text() if output.exists() else ""
    found = {environment: resolved(uv, environment, before, output == LOCK, arguments) for environment in ENVIRONMENTS}
    output.write_text("".join(f"{line}\n" for line in merged(found)))


def resolved(uv: str, environment: Environment, before: str, is_whole: bool, arguments: list[str]) -> dict[str, str]:
    """Versions by package, in one environment; parts of the whole lock take its versions."""
    with tempfile.TemporaryDirectory() as folder:
        lock, constraints, overrides = (Path(folder, f"{name}.txt") for name in ("lock", "constraints", "overrides"))
        lock.write_text(before.replace(CPU_BUILD, ""))
        constraints.write_text("" if is_whole else LOCK.read_text().replace(CPU_BUILD, ""))
        torch = next(
            line for line in (FOLDER / "requirements.in").read_text().splitlines() if line.startswith("torch==")
        )
        overrides.write_text(f"{(FOLDER / 'overrides.txt').read_text()}{torch.removesuffix(CPU_BUILD)}\n")
        subprocess.run(
            [
                uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", environment.python,
                "--python-platform", f"{environment.machine}-manylinux_2_31", "--override", overrides, "--constraint", constraints,
                "--output-file", lock, *arguments,
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        pairs = (line.split("==", 1) for line in lock.read_text().splitlines())
        return {name: version for name, version in pairs if not CUDA.match(name)}


def merged(found: dict[Environment, dict[str, str]]) -> list[str]:
    """The lines of the lock, by name."""
    lines = []
    for name in sorted({name for packages in found.values() for name in packages}):
        versions = {packages[name] for packages in found.values() if name in packages}
        if len(versions) > 1:
            sys.exit(f"{name} has the versions {', '.join(sorted(versions))}: require one that fits everywhere")
        pinned = f"{name}=={versions.pop()}{CPU_BUILD if name == 'torch' else ''}"
        lines.append(pinned + marker({environment for environment, packages in found.items() if name in packages}))
    return lines


def marker(where: set[Environment]) -> str:
    """The marker of a package that is needed there and nowhere else; empty where it is needed everywhere."""
    pythons, machines = {each.python for each in where}, {each.machine for each in where}
    if len(where) != len(pythons) * len(machines):
        sys.exit(f"no marker says {sorted(where)}")
    parts = []
    if len(pythons) == 1:
        parts.append(f'python_version == "{pythons.pop()}"')
    if len(machines) == 1:
        parts.append(f'platform_machine == "{machines.pop()}"')
    return " ; " + " and ".join(parts) if parts else ""


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:])
