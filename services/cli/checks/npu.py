"""Ascend NPUs: devices, driver and CANN. Where the platform is not `npu` and none are there, all is well."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from services.cli.checks.finding import Check, Finding, Subject, ok, problem, warning
from services.common.config.settings import Platform

TIMEOUT_S = 20.0
_VERSION = re.compile(r"^(?:toolkit_\w*version|version)\s*=\s*\[?(?:.*:)?([\w.]+)", re.IGNORECASE | re.MULTILINE)
_ROOTS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "usr/local/Ascend/latest")
_FILES = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg", "version.info")
_DRIVER = "usr/local/Ascend/driver/version.info"


def npu_check(root: Path = Path("/")) -> Check:
    """The check on a file system; another root is for tests."""

    def check_npu(subject: Subject) -> list[Finding]:
        devices = sorted(path for path in root.glob("dev/davinci[0-9]*"))
        wanted = subject.settings.platform is Platform.NPU
        if not devices and not wanted:
            return [ok("npu", f"none, and the platform is {subject.settings.platform}")]
        if not wanted:
            found = f"{len(devices)} devices, but the platform is {subject.settings.platform}"
            return [warning("npu", found, "set MILLRACE_PLATFORM=npu to use them")]
        return [_devices(devices), _driver(root), _cann(root)]

    return check_npu


def _devices(devices: list[Path]) -> Finding:
    if not devices:
        return problem(
            "npu devices",
            "no /dev/davinci*",
            "install the NPU driver; in a container pass the devices (docs/ascend.md)",
        )
    closed = [str(path) for path in devices if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return problem("npu devices", f"no access to {', '.join(closed)}", "add this user to the group HwHiAiUser")
    return ok("npu devices", f"{len(devices)}: {', '.join(path.name for path in devices)}")


def _driver(root: Path) -> Finding:
    remedy = "install the driver and firmware; in a container mount /usr/local/bin/npu-smi and /usr/local/Ascend/driver"
    version = _read_version(root / _DRIVER)
    if shutil.which("npu-smi") is None:
        return problem("npu driver", f"npu-smi is not there (driver {version or 'unknown'})", remedy)
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return problem("npu driver", f"npu-smi does not answer: {error}", remedy)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        return problem("npu driver", f"npu-smi info: {said[-1]}", remedy)
    return ok("npu driver", version or "npu-smi answers")


def _cann(root: Path) -> Finding:
    named = [Path(os.environ[name]) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if os.environ.get(name)]
    for folder in [*named, *(root / name for name in _ROOTS)]:
        for pattern in _FILES:
            for path in sorted(folder.glob(pattern)):
                if version := _read_version(path):
                    return ok("cann", f"{version} ({path})")
    return problem(
        "cann", "no toolkit found", "install CANN and source its set_env.sh (docs/ascend.md names the version)"
    )


def _read_version(path: Path) -> str | None:
    try:
        match = _VERSION.search(path.read_text(errors="replace"))
    except OSError:
        return None
    return match.group(1) if match else None
