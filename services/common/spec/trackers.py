"""Section `trackers`: where the job's metrics are shown, besides the gateway and the job's own folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from services.common.spec.base import Section

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}$")]
_Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")]


class TrackersSpec(Section):
    """Section `trackers`. Addresses and keys are the operator's settings, and in no spec."""

    tensorboard: bool = Field(default=True, description="Event files in the job's folder: trackers/tensorboard.")
    mlflow: bool = Field(default=False, description="MLflow, where the operator has configured it.")
    wandb: bool = Field(default=False, description="Weights & Biases, where the operator has configured it.")
    swanlab: bool = Field(default=False, description="SwanLab, where the operator has configured it.")
    project: _Name = Field(default="millrace", description="Project, or experiment of MLflow, that the run is in.")
    run_name: _Name | None = Field(default=None, description="Name of the run; null: the job's id.")
    tags: list[_Tag] = Field(
        default_factory=list, max_length=20, description="Tags of the run.", examples=[["baseline"]]
    )
    samples_interval_steps: int = Field(
        default=10,
        ge=1,
        le=1_000_000,
        description="Steps between two whose samples are kept in the job's folder: samples.jsonl, at most 32 MiB.",
    )
