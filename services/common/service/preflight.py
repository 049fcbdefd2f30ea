"""Preflight checks: requirements of a service's start. Each raises a ConfigError of one line that names the problem and its place."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
from pydantic import SecretStr
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.redis.connection import connect
from services.common.service.host import CGROUP, container_memory, installed_version

_GIB = 1 << 30


class RedisUnavailable(ConfigError):  # noqa: N818  a state
    """No Redis answers at the address that the settings give."""


async def require_redis(url: str, password: SecretStr | None = None, *, wait_s: float) -> None:
    """Waits at most `wait_s` seconds until Redis answers this user; errors show no password. `password`: where the URL itself has none.

    Raises:
        RedisUnavailable: it does not answer in time.
        ConfigError: it refuses the user.
    """
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else unquote(parts.path)
    try:
        async with connect(url, password=password, outage_s=wait_s) as redis:
            await redis.ping()
    except (AuthenticationError, NoPermissionError) as error:
        raise ConfigError(
            f"REDIS_URL: Redis at {where} refuses the user {parts.username or 'default'!r}: "
            "wrong user or password (MILLRACE_REDIS_PASSWORD_FILE)"
        ) from error
    except (RedisError, OSError) as error:
        raise RedisUnavailable(f"REDIS_URL: no Redis answers at {where}: {error}") from error


def require_disk_space(folder: Path, min_free_gib: float) -> None:
    """Makes the folder, and checks that it can be written and that its volume has at least `min_free_gib` GiB free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"MILLRACE_HOME: {folder} cannot be written: {error.strerror}") from error
    if free < min_free_gib * _GIB:
        raise ConfigError(
            f"MILLRACE_HOME: the volume of {folder} has {free / _GIB:.2f} GiB free, and MILLRACE_MIN_FREE_GIB={min_free_gib:g} are needed"
        )


def require_memory(min_memory_gib: float, cgroup: Path = CGROUP) -> None:
    """Checks that this machine, and the container's limit where there is one, have at least `min_memory_gib` GiB available."""
    free, whose = psutil.virtual_memory().available, "this machine"
    container = container_memory(cgroup)
    if container is not None and container.free < free:
        free, whose = container.free, f"the container (limit {container.limit / _GIB:.2f} GiB)"
    if free < min_memory_gib * _GIB:
        raise ConfigError(
            f"{whose} has {free / _GIB:.2f} GiB of memory left, and MILLRACE_MIN_MEMORY_GIB={min_memory_gib:g} are needed"
        )


def require_platform(platform: Platform) -> None:
    """Checks that the installed packages compute on the platform; imports none of them."""
    torch, npu = installed_version("torch"), installed_version("torch_npu")
    if torch is None:
        trouble = "torch is not installed here"
    elif platform is Platform.NPU and npu is None:
        trouble = "torch_npu is not installed here: take the image for Ascend (docs/ascend.md)"
    elif platform is Platform.CUDA and torch.endswith("+cpu"):
        trouble = f"torch {torch} computes on CPUs only: take an image with a CUDA build"
    else:
        return
    raise ConfigError(f"MILLRACE_PLATFORM={platform}: {trouble}")
