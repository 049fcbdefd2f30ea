"""Settings of a service, read from the environment (`MILLRACE_…`). A secret may come from a file: `MILLRACE_TOKEN_FILE`."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from services.common.config.hub_folder import HubFolder
from services.common.config.judges import Endpoints
from services.common.errors import ConfigError
from services.common.spec.reference import HUBS

_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  compared with, not bound to
_OBJECTS = ("judge_endpoints",)
"""Settings that are JSON objects."""
_SECRETS = (
    "token", "internal_token", "redis_password", "mlflow_token", "mlflow_password", "wandb_api_key", "swanlab_api_key",
)  # fmt: skip


def _items(separator: str) -> Callable[[object], object]:
    """A validator that makes a list of a text: a JSON list, or items with a separator between them."""

    def split(value: object) -> object:
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return [item.strip() for item in value.split(separator) if item.strip()]
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f'is no JSON list; write one{separator}two, or \'["one", "two"]\'') from error

    return split


Names = Annotated[list[str], NoDecode, BeforeValidator(_items(","))]
Paths = Annotated[list[Path], NoDecode, BeforeValidator(_items(os.pathsep))]

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")

STACK_CORES = "MILLRACE_STACK_CORES"
"""Environment variable with the cores of a stack on one machine, where `millrace up` divides them: `0,1`."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank whose collective operation waits longer exits; HCCL's own limits are shorter (deploy/compose.ascend.yaml)."""


class Platform(StrEnum):
    """The hardware that the engine and the ranks compute on."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


class Programs(StrEnum):
    """Whether programs that a model writes run, in verifier `code` or environment `python` (docs/security.md)."""

    OFF = "0"
    ISOLATED = "1"
    """Where the kernel isolates them; elsewhere they fail."""
    ANYWHERE = "anywhere"
    """Without isolation, too."""


class TrackerMode(StrEnum):
    """Where a tracker's client writes."""

    ONLINE = "online"
    OFFLINE = "offline"


class OtlpProtocol(StrEnum):
    """Wire format of traces."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


class Settings(BaseSettings):
    """The settings of every service. Relative paths are relative to the working directory."""

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
    environment_port: int = Field(
        default=0, ge=0, le=65535, description="Port of an environment server's gRPC for episodes; 0 takes a free one."
    )
    environment_places: int = Field(
        default=256, ge=1, le=65_536, description="Episodes that an environment server plays at once."
    )
    environment_memory_mib: int = Field(
        default=1024,
        ge=64,
        description="Memory limit of one episode's process, MiB, beyond what the server has loaded.",
    )
    environment_python: Path | None = Field(
        default=None,
        description="Python that `millrace up` starts the environment service with (default: its own): for environments "
        "whose packages do not go together with the engine's.",
    )
    gateway_port: int = Field(default=8080, ge=0, le=65535, description="The gateway's port.")
    gateway_hosts: Names = Field(
        default_factory=list,
        description="Further names (`one,two`, without ports) under which the gateway is reached: of a proxy, or in a container network.",
    )
    max_event_streams: int = Field(default=1000, ge=1, description="Event streams that the gateway holds open at once.")
    max_requests: int = Field(
        default=256,
        ge=4,
        description="Reads that the gateway has in flight at once, and as many chats; a quarter of it of changes, and of submissions.",
    )
    token: SecretStr | None = Field(default=None, description="Bearer token of the gateway.")
    token_file: Path | None = Field(default=None, description="File that holds the token.")
    internal_token: SecretStr | None = Field(
        default=None, min_length=1, description="Token of the services' gRPC; needed beyond loopback."
    )
    internal_token_file: Path | None = Field(default=None, description="File that holds the internal token.")
    journal_key_file: Path | None = Field(
        default=None, description="File with the key that the learner seals its journals with."
    )
    model_roots: Paths = Field(
        default_factory=list,
        description="Directories that models may lie in (`/one:/two`, or a JSON list), besides <home>/models.",
    )
    data_roots: Paths = Field(
        default_factory=list,
        description="Directories that datasets may lie in (`/one:/two`, or a JSON list), besides <home>/data.",
    )
    hubs: Annotated[Names | None, NoDecode] = Field(
        default=None,
        description="Hubs that models and data are fetched from (`hf,modelscope`). Unset: both where only this machine reaches "
        "the gateway; beyond loopback, and behind a proxy (MILLRACE_GATEWAY_HOSTS), none.",
    )
    max_hub_bytes: ByteSize = Field(
        default=ByteSize(100 * 1024**3),
        ge=1,
        description="Largest model, or data file, that is fetched from a hub, e.g. 200GiB.",
    )
    hub_stall_s: float = Field(
        default=60.0, ge=1, description="A fetch from which no byte comes for so long is broken off, and tried again."
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
    shared_memory: Path = Field(
        default=Path("/dev/shm"),  # noqa: S108  the directories made there are private
        description="Directory in shared memory below which received weights wait for the engine.",
    )
    keep_jobs: int | None = Field(default=None, ge=0, description="Ended jobs that are kept, the newest; unset: all.")
    keep_jobs_days: float | None = Field(default=None, ge=0, description="Days for which ended jobs are kept.")
    keep_jobs_bytes: ByteSize | None = Field(
        default=None, ge=0, description="What the folders of ended jobs may take, e.g. 200GiB; the oldest go."
    )
    keep_in_redis_hours: float = Field(
        default=24.0,
        ge=0,
        description="Hours after a job's end for which Redis keeps its samples, events and histories.",
    )
    mlflow_uri: str | None = Field(
        default=None, min_length=1, description="MLflow's server or store; jobs may then name mlflow in trackers."
    )
    mlflow_token: SecretStr | None = Field(default=None, min_length=1, description="Bearer token for it.")
    mlflow_token_file: Path | None = Field(default=None, description="File that holds that token.")
    mlflow_username: str | None = Field(default=None, description="User of MLflow's own sign-in.")
    mlflow_password: SecretStr | None = Field(default=None, min_length=1, description="That user's password.")
    mlflow_password_file: Path | None = Field(default=None, description="File that holds that password.")
    wandb_mode: TrackerMode = Field(
        default=TrackerMode.ONLINE, description="offline: W&B's own files in the job's folder, and no server."
    )
    wandb_url: str = Field(default="https://api.wandb.ai", description="The server of Weights & Biases.")
    wandb_api_key: SecretStr | None = Field(
        default=None, min_length=1, description="Key for it; jobs may then name wandb in trackers."
    )
    wandb_api_key_file: Path | None = Field(default=None, description="File that holds that key.")
    wandb_entity: str | None = Field(default=None, description="User or team of W&B that runs belong to.")
    swanlab_mode: TrackerMode = Field(
        default=TrackerMode.ONLINE, description="offline: SwanLab's own files in the job's folder, and no server."
    )
    swanlab_url: str | None = Field(default=None, description="SwanLab's server (default: its own).")
    swanlab_api_key: SecretStr | None = Field(
        default=None, min_length=1, description="Key for it; jobs may then name swanlab in trackers."
    )
    swanlab_api_key_file: Path | None = Field(default=None, description="File that holds that key.")
    swanlab_workspace: str | None = Field(default=None, description="Workspace of SwanLab that runs belong to.")
    tracker_interval_s: float = Field(
        default=15.0, gt=0, description="Seconds between two batches that one tracker of a job gets."
    )
    tracker_timeout_s: float = Field(
        default=60.0, gt=0, description="Time limit of one batch; then the process that sends it is killed."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="Collector that gets the traces of groups; unset: no traces.",
    )
    otlp_protocol: OtlpProtocol = Field(
        default=OtlpProtocol.HTTP,
        validation_alias="OTEL_EXPORTER_OTLP_PROTOCOL",
        description="http/protobuf or grpc.",
    )
    trace_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        validation_alias="OTEL_TRACES_SAMPLER_ARG",
        description="Share of the groups that are traced: the same groups in every service.",
    )
    max_data_bytes: int = Field(
        default=64 * 1024**3,
        ge=1,
        description="Largest dataset file, and largest columns of a parquet file once unpacked, bytes.",
    )
    max_row_bytes: int = Field(default=8 * 1024**2, ge=1, description="Largest row of a dataset file, bytes.")
    max_prompt_chars: int = Field(
        default=256 * 1024, ge=1, description="Longest prompt and longest ground truth of a task, characters."
    )
    max_ranks: int | None = Field(default=None, ge=1, description="Ranks of one job (default: by this machine).")
    learner_cores: int | None = Field(
        default=None,
        ge=1,
        description="CPU platform: the learner's cores, for threads_per_rank: 0 (default: half of the machine's).",
    )
    max_threads: int | None = Field(default=None, ge=1, description="CPU platform: threads of a job's ranks together.")
    max_engine_devices: int | None = Field(default=None, ge=1, description="Processes, or devices, of one engine.")
    max_kv_cache_gib: float | None = Field(default=None, gt=0, description="CPU platform: KV cache of one engine, GiB.")
    max_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory that a job's ranks and one engine need for its model, GiB."
    )
    max_tokens_in_flight: int | None = Field(default=None, ge=1, description="Slots × group_size × rollout_max_tokens.")
    max_rollouts_in_flight: int | None = Field(default=None, ge=1, description="Slots × group_size.")
    max_entry_bytes: ByteSize | None = Field(
        default=None, ge=1, le=512 * 1024**2, description="What one group may take in a stream of Redis, e.g. 64MiB."
    )
    max_sequence_tokens: int | None = Field(default=None, ge=1, description="Longest prompt + response, tokens.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps of one job.")
    max_eval_rollouts: int | None = Field(default=None, ge=1, description="Rollouts of one evaluation.")
    max_verifier_memory_mib: int | None = Field(default=None, ge=1, description="Memory limit of one check, MiB.")
    code_reward: Programs = Field(
        default=Programs.OFF,
        description="Verifier code runs programs that the model writes: 1 where the kernel isolates them, anywhere without that, 0 never.",
    )
    code_environment: Programs = Field(
        default=Programs.OFF,
        description="Environment python runs programs that the model writes: as MILLRACE_CODE_REWARD.",
    )
    openenv_hosts: Names = Field(
        default_factory=list,
        description="OpenEnv servers that environment openenv may reach, `host:port,host:port`; none: it plays nothing.",
    )
    judge_endpoints: Endpoints = Field(
        default_factory=dict,
        description="Servers that judge responses, for `reward.judges` (JSON object): name → url, model, key_file or key_variable, "
        "requests_at_once, requests_per_minute. The gateway needs the names, the reward service the keys too.",
    )
    reward_model_platform: Platform | None = Field(
        default=None, description="cpu, cuda or npu: what reward models compute on (default: MILLRACE_PLATFORM)."
    )
    reward_model_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU platform: threads of one reward model (default: half of the cores).",
    )
    reward_model_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="CPU platform: address space of a job's reward models together, GiB (default: half of the memory).",
    )
    drain_timeout_s: float = Field(default=30.0, gt=0, description="Longest drain after SIGTERM.")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR.")

    @field_validator("gateway_hosts")
    @classmethod
    def _names_only(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not host.isascii() or not host or set(host) & set("/@?#* ") or (":" in host and host.count(":") < 2):
                raise ValueError(f"{host!r} is no host's name: it has neither scheme nor port")
        return hosts

    @field_validator("openenv_hosts")
    @classmethod
    def _hosts_and_ports(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST_AND_PORT.fullmatch(host):
                raise ValueError(f"{host!r} is no host and port: write envs.example.org:8000, or [::1]:8000")
        return [host.lower() for host in hosts]

    @field_validator("hubs")
    @classmethod
    def _known_hubs(cls, hubs: list[str] | None) -> list[str] | None:
        for hub in hubs or ():
            if hub not in HUBS:
                raise ValueError(f"{hub!r} is no hub that is known here ({', '.join(HUBS)})")
        return hubs

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        for name in _SECRETS:
            path = getattr(self, f"{name}_file")
            if getattr(self, name) is None and path is not None:
                object.__setattr__(self, name, _read_secret(f"MILLRACE_{name.upper()}_FILE", path))
        if self.advertise_host is None and self.bind_host in _ALL_ADDRESSES:
            object.__setattr__(self, "advertise_host", socket.gethostname())
        return self

    def public(self) -> dict[str, Any]:
        """The settings as JSON values, without secrets and their files: for a process that must not have them."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"redis_url"})
        return {name: value for name, value in values.items() if not name.startswith(_SECRETS)}

    @property
    def internal_secret(self) -> str | None:
        """The internal token, if there is one."""
        return None if self.internal_token is None else self.internal_token.get_secret_value()

    @property
    def runs_code(self) -> bool:
        """Whether the operator lets verifier `code` run."""
        return self.code_reward is not Programs.OFF

    @property
    def models_dir(self) -> Path:
        """The directory of registered models, one directory each."""
        return self.home / "models"

    @property
    def hub_folder(self) -> HubFolder:
        """What came from hubs."""
        return HubFolder(self.home / "hubs")

    @property
    def allowed_hubs(self) -> tuple[str, ...]:
        """Hubs that this process may fetch from.

        By default none where others reach it: whoever may submit jobs would use this site's network, disk and hub tokens.
        """
        if self.hubs is None:
            return HUBS if is_loopback(self.bind_host) and not self.gateway_hosts else ()
        return tuple(self.hubs)

    def job_dir(self, job_id: str) -> Path:
        """The job's own folder: spec, checkpoints, journal, exports."""
        return self.home / "jobs" / job_id

    def worker_name(self, service: str) -> str:
        """This worker's stable name."""
        return self.worker or f"{service}-{socket.gethostname()}"

    def require_token_beyond_loopback(self, token: SecretStr | None, name: str) -> None:
        """Raises ConfigError, which names the variable, when other machines reach `bind_host` and there is no token."""
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


def address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def load_settings() -> Settings:
    """The settings of this process. Raises ConfigError, which names the variable, when one has a wrong value."""
    try:
        return Settings()
    except SettingsError as error:
        named = re.search(r'"(\w+)"', str(error))
        name = f"MILLRACE_{named[1].upper()}" if named else "a setting"
        raise ConfigError(f"{name}: must be a JSON object, as in '{{\"name\": {{…}}}}'") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if not first["loc"]:  # raised by a validator of this module, whose message names the variable
            raise ConfigError(str(first["msg"]).removeprefix("Value error, ")) from error
        field, *inside = map(str, first["loc"])
        name = field if field.isupper() else f"MILLRACE_{field.upper()}"
        where = f"{name}: {'.'.join(inside)}" if inside and field in _OBJECTS else name
        raise ConfigError(f"{where}: {str(first['msg']).removeprefix('Value error, ')}") from error
