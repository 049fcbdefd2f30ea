"""Settings of a service, from the environment (`MILLRACE_…`). A secret may come from a file: `MILLRACE_TOKEN_FILE`."""

from __future__ import annotations

import ipaddress
import socket
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.errors import ConfigError

_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  compared with, not bound to


class Platform(StrEnum):
    """What the engine and the ranks compute on."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


class Settings(BaseSettings):
    """What every service reads. Relative paths are relative to the working directory."""

    model_config = SettingsConfigDict(env_prefix="MILLRACE_", extra="ignore", frozen=True)

    home: Path = Field(default=Path(".millrace"), description="Jobs, models and logs live below it.")
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        validation_alias="REDIS_URL",
        description="The Redis server, with the user's name: redis://learner@host:6379/0.",
    )
    redis_password: SecretStr | None = Field(
        default=None, min_length=1, description="The Redis user's password, where REDIS_URL has none."
    )
    redis_password_file: Path | None = Field(default=None, description="File that holds the Redis user's password.")
    redis_wait_s: float = Field(default=20.0, ge=0, description="How long a starting service waits for Redis, seconds.")
    platform: Platform = Field(default=Platform.CPU, description="cpu, cuda or npu.")
    worker: str | None = Field(default=None, description="This worker's stable name (default: <service>-<host>).")
    bind_host: str = Field(default="127.0.0.1", description="Address that this service's servers listen on.")
    advertise_host: str | None = Field(
        default=None,
        description="Address under which others reach this service (default: bind_host, or this machine's name for all addresses).",
    )
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Port of /metrics, /healthz and /readyz; 0 takes a free one."
    )
    inference_port: int = Field(
        default=0, ge=0, le=65535, description="Port of a rollout server's gRPC for chats; 0 takes a free one."
    )
    gateway_port: int = Field(default=8080, ge=0, le=65535, description="The gateway's port.")
    token: SecretStr | None = Field(default=None, description="Bearer token of the gateway.")
    token_file: Path | None = Field(default=None, description="File that holds the token.")
    internal_token: SecretStr | None = Field(
        default=None, min_length=1, description="Token of the services' gRPC; needed beyond loopback."
    )
    internal_token_file: Path | None = Field(default=None, description="File that holds the internal token.")
    model_roots: list[Path] = Field(
        default_factory=list, description="Directories that models may lie in (JSON list), besides <home>/models."
    )
    data_roots: list[Path] = Field(
        default_factory=list, description="Directories that datasets may lie in (JSON list), besides <home>/data."
    )
    learner_nodes: int = Field(
        default=1, ge=1, le=1024, description="Machines that the learner's ranks are spread over."
    )
    learner_node: int = Field(default=0, ge=0, description="Which of them this one is; 0 takes the jobs.")
    learner_rendezvous: str | None = Field(
        default=None, description="host:port on node 0 where the learner's machines meet; needed from two on."
    )
    min_memory_gib: float = Field(
        default=1.5, ge=0, description="Learner and rollout servers do not start with less memory available, GiB."
    )
    min_free_gib: float = Field(
        default=1.0, ge=0, description="The learner does not start with less room below <home>/jobs, GiB."
    )
    max_data_bytes: int = Field(
        default=2 * 1024**3,
        ge=1,
        description="Largest dataset file, and largest columns of a parquet file once unpacked, bytes.",
    )
    max_row_bytes: int = Field(default=8 * 1024**2, ge=1, description="Largest row of a dataset file, bytes.")
    max_prompt_chars: int = Field(
        default=256 * 1024, ge=1, description="Longest prompt and longest ground truth of a task, characters."
    )
    drain_timeout_s: float = Field(default=30.0, gt=0, description="Longest drain after SIGTERM.")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR.")

    @model_validator(mode="after")
    def _secrets_from_files(self) -> Self:
        for name in ("token", "internal_token", "redis_password"):
            path = getattr(self, f"{name}_file")
            if getattr(self, name) is None and path is not None:
                object.__setattr__(self, name, _read_secret(f"MILLRACE_{name.upper()}_FILE", path))
        return self

    @model_validator(mode="after")
    def _reachable_name(self) -> Self:
        if self.advertise_host is None and self.bind_host in _ALL_ADDRESSES:
            object.__setattr__(self, "advertise_host", socket.gethostname())
        return self

    def public(self) -> dict[str, Any]:
        """The settings as JSON values, secrets and where they lie left out: for a process that has no business with those."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"redis_url"})
        secret = ("token", "internal_token", "redis_password")
        return {name: value for name, value in values.items() if not name.startswith(secret)}

    @property
    def models_dir(self) -> Path:
        """Where registered models lie, one directory each."""
        return self.home / "models"

    def job_dir(self, job_id: str) -> Path:
        """The job's own folder: spec, checkpoints, journal, exports."""
        return self.home / "jobs" / job_id

    def worker_name(self, service: str) -> str:
        """This worker's stable name."""
        return self.worker or f"{service}-{socket.gethostname()}"

    def require_token_beyond_loopback(self, token: SecretStr | None, name: str) -> None:
        """Refuses to listen where others can reach without a token.

        Raises:
            ConfigError: `bind_host` is not loopback and there is no token.
        """
        if token is None and not is_loopback(self.bind_host):
            raise ConfigError(f"MILLRACE_BIND_HOST={self.bind_host} is not loopback: set {name} (or {name}_FILE) first")


def _read_secret(variable: str, path: Path) -> SecretStr:
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable}: cannot read {path}: {getattr(error, 'strerror', 'not text')}") from error
    if not secret:
        raise ValueError(f"{variable}: {path} is empty")
    return SecretStr(secret)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings() -> Settings:
    """The settings of this process.

    Raises:
        ConfigError: a variable has a wrong value; names it.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if not first["loc"]:  # said by a validator of ours, which names the variable
            raise ConfigError(str(first["msg"]).removeprefix("Value error, ")) from error
        field = str(first["loc"][0])
        name = field if field.isupper() else f"MILLRACE_{field.upper()}"
        raise ConfigError(f"{name}: {first['msg']}") from error
