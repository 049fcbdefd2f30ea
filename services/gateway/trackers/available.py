"""Trackers that are configured here: the check of a job's section `trackers`, and the options that a tracker's child process gets."""

from __future__ import annotations

from services.common.config.settings import Settings, TrackerMode
from services.common.errors import ConfigError, Problem
from services.common.service.host import installed_version
from services.common.spec.trackers import TrackersSpec

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
}
"""Tracker → packages that have its client; one is enough."""


def wanted(spec: TrackersSpec) -> list[str]:
    """The trackers that a job names."""
    return [name for name in PACKAGES if getattr(spec, name)]


def obstacle(name: str, settings: Settings) -> str:
    """Why this tracker cannot be used here, for the operator; empty when it can."""
    if not any(installed_version(package) for package in PACKAGES[name]):
        return f"its client is not installed here: pip install {PACKAGES[name][0]}"
    if name == "mlflow" and settings.mlflow_uri is None:
        return "is not configured here: set MILLRACE_MLFLOW_URI"
    if name == "wandb" and settings.wandb_mode is TrackerMode.ONLINE and settings.wandb_api_key is None:
        return "is not configured here: set MILLRACE_WANDB_API_KEY, or MILLRACE_WANDB_MODE=offline"
    if name == "swanlab" and settings.swanlab_mode is TrackerMode.ONLINE and settings.swanlab_api_key is None:
        return "is not configured here: set MILLRACE_SWANLAB_API_KEY, or MILLRACE_SWANLAB_MODE=offline"
    return ""


def check_trackers(spec: TrackersSpec, settings: Settings) -> None:
    """Checks that the trackers which a job asks for can be used. Raises ConfigError with a problem for each that cannot.

    TensorBoard, which is on by default, is no reason to refuse a job.
    """
    found = [(name, obstacle(name, settings)) for name in wanted(spec) if name != "tensorboard"]
    if problems := [Problem(f"trackers.{name}", reason) for name, reason in found if reason]:
        raise ConfigError(*problems)


def options_of(name: str, settings: Settings) -> dict[str, str]:
    """The operator's addresses and keys for one tracker, keys in plain text; those that are not set are left out."""
    secrets = {
        "MLFLOW_TRACKING_TOKEN": settings.mlflow_token, "MLFLOW_TRACKING_PASSWORD": settings.mlflow_password,
    } if name == "mlflow" else {"api_key": getattr(settings, f"{name}_api_key", None)}  # fmt: skip
    plain: dict[str, str | None] = {
        "mlflow": {"uri": settings.mlflow_uri, "MLFLOW_TRACKING_USERNAME": settings.mlflow_username},
        "wandb": {"mode": settings.wandb_mode, "url": settings.wandb_url, "entity": settings.wandb_entity},
        "swanlab": {
            "mode": settings.swanlab_mode, "url": settings.swanlab_url, "workspace": settings.swanlab_workspace,
        },
    }.get(name, {})  # fmt: skip
    found = {key: str(value) for key, value in plain.items() if value is not None}
    return found | {key: secret.get_secret_value() for key, secret in secrets.items() if secret is not None}
