"""Ascend NPU checks: devices, driver and CANN. No NPU is no problem where the platform is not `npu`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.common.config.settings import Platform

TIMEOUT_S = 20.0
_VERSION = re.compile(r"^(?:toolkit_\w*version|version)\s*=\s*\[?(?:.*:)?([\w.]+)", re.IGNORECASE | re.MULTILINE)
_TOOLKIT_FOLDERS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "usr/local/Ascend/latest")
_TOOLKIT_VERSION_FILES = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg", "version.info")
_DRIVER_VERSION_FILE = "usr/local/Ascend/driver/version.info"


def check_npu(subject: Subject, root: Path = Path("/")) -> list[Finding]:
    """Devices, driver and toolkit of the file system below `root`."""
    devices, platform = sorted(root.glob("dev/davinci[0-9]*")), subject.settings.platform
    if platform is Platform.NPU:
        return [_check_devices(devices), _check_driver(root), _check_cann(root)]
    if devices:
        found = f"{len(devices)} devices, but the platform is {platform}"
        return [warning("npu", found, "set MILLRACE_PLATFORM=npu to use them")]
    return [ok("npu", f"none, and the platform is {platform}")]


def _check_devices(devices: list[Path]) -> Finding:
    if not devices:
        remedy = "install the NPU driver; in a container pass the devices (docs/ascend.md)"
        return problem("npu devices", "no /dev/davinci*", remedy)
    denied = [str(path) for path in devices if not os.access(path, os.R_OK | os.W_OK)]
    if denied:
        return problem("npu devices", f"no access to {', '.join(denied)}", "add this user to the group HwHiAiUser")
    return ok("npu devices", f"{len(devices)}: {', '.join(path.name for path in devices)}")


def _check_driver(root: Path) -> Finding:
    remedy = "install the driver and firmware; in a container mount /usr/local/bin/npu-smi and /usr/local/Ascend/driver"
    version = _read_version(root / _DRIVER_VERSION_FILE)
    if shutil.which("npu-smi") is None:
        return problem("npu driver", f"npu-smi is not there (driver {version or 'unknown'})", remedy)
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return problem("npu driver", f"npu-smi does not answer: {error}", remedy)
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        return problem("npu driver", f"npu-smi info: {output[-1]}", remedy)
    return ok("npu driver", version or "npu-smi answers")


def _check_cann(root: Path) -> Finding:
    named = [Path(value) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if (value := os.environ.get(name))]
    for folder in [*named, *(root / name for name in _TOOLKIT_FOLDERS)]:
        for pattern in _TOOLKIT_VERSION_FILES:
            for path in sorted(folder.glob(pattern)):
                if version := _read_version(path):
                    return ok("cann", f"{version} ({path})")
    remedy = "install CANN and source its set_env.sh (docs/ascend.md names the version)"
    return problem("cann", "no toolkit found", remedy)


def _read_version(path: Path) -> str | None:
    try:
        match = _VERSION.search(path.read_text(errors="replace"))
    except OSError:
        return None
    return match.group(1) if match else None
