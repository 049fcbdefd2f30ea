"""Switches: what the operator lets the environments that come along do. A child has no other setting of the service.

service ── variables ──► forkserver ──► child ──► `python`: programs        `openenv`: hosts
"""

from __future__ import annotations

import os
from functools import cache

from services.common.config.settings import Programs, Settings
from services.common.errors import ProgramError
from services.common.programs.sandbox import CODE_ENVIRONMENT, isolation_fault, not_isolated

OPENENV_HOSTS = "MILLRACE_OPENENV_HOSTS"


def variables(settings: Settings) -> dict[str, str]:
    """The environment variables that children get."""
    return {CODE_ENVIRONMENT: settings.code_environment, OPENENV_HOSTS: ",".join(settings.openenv_hosts)}


@cache
def programs_fault() -> str:
    """Why programs that a model writes do not run here, for people; empty where they do. Asks the kernel once in a process."""
    allowed = os.environ.get(CODE_ENVIRONMENT, Programs.OFF)
    if allowed == Programs.ANYWHERE:
        return ""
    if allowed != Programs.ISOLATED:
        return f"it is off on this server until its operator sets {CODE_ENVIRONMENT}=1"
    try:
        fault = isolation_fault()
    except ProgramError as error:
        return str(error)
    return not_isolated(fault, CODE_ENVIRONMENT) if fault else ""


def openenv_hosts() -> frozenset[str]:
    """`host:port`, in lower case, of the OpenEnv servers that jobs may name."""
    return frozenset(filter(None, os.environ.get(OPENENV_HOSTS, "").split(",")))
