"""Schemas of the gateway's JSON: the models of its answers, which also define its OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, JsonValue, StringConstraints, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from services.common.jobs.record import JobState
from services.common.jobs.step_record import StepRecord
from services.common.redis.keys import Stage
from services.common.service.heartbeat import WorkerKind
from services.common.spec.job import JobSpec, Notes, Tags
from services.common.streams.sample_record import SampleRecord
from services.common.streams.types import VerdictStatus

JOB_ID_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}-[0-9a-f]{8}$"

EXAMPLE_JOB_ID = "demo-3f2a91c0"
EXAMPLE_SPEC: dict[str, Any] = {
    "name": "demo",
    "model": {"path": "tiny"},
    "data": {"train": {"source": "reasoning_gym:chain_sum", "config": {"max_terms": 2}}},
    "learner": {"steps": 200, "lr": 6e-4},
}
EXAMPLE_STEP: dict[str, Any] = {"step": 17, "reward": 0.41, "policy_age_max": 1}
EXAMPLE_EVAL: dict[str, Any] = {"step": 0, "avg_at_k": 0.38, "avg_at_k_se": 0.02, "pass_at_k": 0.81}
EXAMPLE_SAMPLE: dict[str, Any] = {
    "group_id": 131,
    "purpose": "train",
    "prompt": "user: 2 + 3 =",
    "ground_truth": "5",
    "rollouts": [{"text": "5", "reward": 1.0, "accuracy": 1.0}],
}

OpenObject = dict[str, Any]
"""A JSON object that another service defines; the gateway passes it on unchanged."""


class Answer(BaseModel):
    """Base of all answers. `model_validate` reads the attributes of the object that an answer shows."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), from_attributes=True)


class FieldProblem(Answer):
    """One thing that is wrong with a request."""

    field: str = Field(description="Where it is, as a dotted path.", examples=["learner.lr"])
    message: str = Field(description="What is wrong.", examples=["Input should be greater than 0 (got '-1')"])


class ErrorDetail(Answer):
    """What went wrong."""

    code: str = Field(description="A stable word for programs.", examples=["invalid_request", "not_found"])
    message: str = Field(description="A sentence for people.")
    fields: list[FieldProblem] | None = Field(default=None, description="Each wrong field, where fields are wrong.")


class ErrorAnswer(Answer):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class JobSummary(Answer):
    """A job, without its spec."""

    id: Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)] = Field(
        description="Names the job.", examples=[EXAMPLE_JOB_ID]
    )
    name: str = Field(description="The spec's name.", examples=["demo"])
    state: JobState = Field(description="Where the job is in its life.", examples=["running"])
    cause: str = Field(description="Why it is stalled, paused, failed or cancelled; empty otherwise.")
    created_at: float = Field(description="Unix seconds.", examples=[1760000000.0])
    started_at: float | None = Field(description="Unix seconds; null while queued.")
    finished_at: float | None = Field(description="Unix seconds; null until it has ended.")
    learner: str | None = Field(description="The learner that owns it.", examples=["learner-node1"])
    lineage: int = Field(ge=0, description="Rises with every rollback of the learner.")
    step: int = Field(ge=0, description="Optimizer steps made.", examples=[17])
    steps: int = Field(ge=1, description="Optimizer steps asked for.", examples=[200])
    policy_version: int = Field(ge=0, description="Newest published policy; 0 = initial weights.", examples=[17])
    cancel_requested: bool = Field(description="Whether the learner has been asked to stop.")
    pause_requested: bool = Field(description="Whether the job is to be paused, or is.")
    groups: dict[str, int] = Field(description="Groups issued, active, and by fate.", examples=[{"trained": 1088}])
    failure: str = Field(
        description="Why the newest failed group failed; empty while none has.",
        examples=["8 of 8 checks failed: ValueError: boom"],
    )
    export: str | None = Field(description="Directory of the newest weights in Hugging Face format.")
    tags: list[str] = Field(description="Labels.", examples=[["ablation"]])
    notes: str = Field(description="A remark for people.")
    model: str = Field(description="The spec's `model.path`.", examples=["tiny"])
    data: str = Field(description="The spec's `data.train.source`.", examples=["reasoning_gym:chain_sum"])
    reward: float | None = Field(
        description="Mean reward of the newest step in which rollouts were judged.", examples=[0.61]
    )
    best_score: float | None = Field(
        description="Highest avg@k of its held-out evaluations; null without one.", examples=[0.72]
    )
    best_score_se: float | None = Field(description="Standard error of that.", examples=[0.013])


class Labels(BaseModel):
    """Tags and notes to set; what is left out stays."""

    model_config = ConfigDict(extra="forbid")

    tags: Tags | None = Field(default=None, description="All tags that the job then has.")
    notes: Notes | None = Field(default=None, description="The job's notes.", examples=["lr of the paper"])


class Job(JobSummary):
    """A job and its resolved spec."""

    failed_reasons: dict[str, int] = Field(
        description="Failed groups by reason, the most frequent; live, before the first step too.",
        examples=[{"8 of 8 checks failed: ValueError: boom": 17}],
    )
    spec: JobSpec = Field(description="The spec with every default written out.")


class PromptPreview(Answer):
    """A task's prompt as the model will see it."""

    index: int = Field(ge=0, description="Of the task in its source.", examples=[0])
    text: str = Field(
        description="What the chat template writes, special tokens included; empty where it refuses the prompt.",
        examples=["<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n"],
    )
    tokens: int = Field(ge=0, description="Its length.", examples=[14])


class TriedVerdict(Answer):
    """How a response is judged."""

    status: VerdictStatus = Field(description="Outcome of the check.", examples=["scored"])
    reward: float | None = Field(description="Null where the check failed.", examples=[1.0])
    accuracy: float | None = Field(description="0 to 1; null where there is no reward.", examples=[1.0])
    detail: str = Field(description="The verifier's own words.", examples=["5 is right"])


class ReferenceCheck(Answer):
    """How a task's reference is judged, stated in the usual forms of an answer."""

    index: int = Field(ge=0, description="Of the task in its source.", examples=[0])
    data_source: str = Field(description="The verifier is chosen by it.", examples=["openai/gsm8k"])
    ground_truth: str = Field(description="The reference.", examples=["72"])
    verifier: str = Field(description="Name of what judges it.", examples=["gsm8k"])
    accepted: list[str] = Field(description="Forms in which the reference is right.", examples=[["alone", "#### …"]])
    right: bool | None = Field(description="Whether there is one; null where the reference is tests of a program.")
    detail: str = Field(description="The verifier's words on the reference alone, where it is not right.")
    response: TriedVerdict | None = Field(description="Of the response that the request gives.")


class SectionCheck(Answer):
    """The tasks of a section of `data`, before any is sampled."""

    tasks: int = Field(ge=0, description="Tasks of the source.", examples=[7473])
    counted: int = Field(
        ge=0, description="Tasks whose prompts were counted in the time, the first of the source.", examples=[7473]
    )
    shortest: int = Field(ge=0, description="Tokens of the shortest prompt.", examples=[45])
    median: int = Field(ge=0, description="Tokens of the median prompt.", examples=[92])
    longest: int = Field(ge=0, description="Tokens of the longest prompt.", examples=[239])
    room: int = Field(description="Tokens that the context leaves a prompt beside a whole response.", examples=[1792])
    too_long: int = Field(
        ge=0, description="Counted prompts that have more; left out, or their groups fail.", examples=[0]
    )
    filtered: bool = Field(description="Whether those are left out (`data.filter_overlong_prompts`).")
    refused: int = Field(ge=0, description="Counted prompts that the chat template refuses.", examples=[0])
    refusal: str = Field(description="Why, of the first of them.")
    prompts: list[PromptPreview] = Field(description="The first prompts.")
    references: list[ReferenceCheck] = Field(description="Those of the same tasks; empty where they were not judged.")


class JobCheck(Answer):
    """Result of a dry run."""

    spec: JobSpec = Field(description="The spec with every default written out.")
    unchecked: list[str] = Field(description="Fields that could not be checked in time; the learner checks them.")
    sections: dict[str, SectionCheck] = Field(
        description="By section of `data`: `train`, and `eval` where there is one."
    )
    notes: list[str] = Field(description="What was not tried, and why.")


class JobList(Answer):
    """A page of jobs, newest first."""

    total: int = Field(ge=0, description="Jobs there are in all.")
    jobs: list[JobSummary]


class Run(JobSummary):
    """A job in a comparison."""

    last_step: OpenObject | None = Field(
        description="Its newest step record; null before the first.", examples=[EXAMPLE_STEP]
    )
    best_eval: OpenObject | None = Field(
        description="The evaluation with the highest avg_at_k; null without one.", examples=[EXAMPLE_EVAL]
    )


class SettingDifference(Answer):
    """A setting in which the jobs of a comparison differ."""

    path: str = Field(description="Dotted path in the spec.", examples=["learner.lr"])
    values: list[JsonValue] = Field(
        description="Its value in each job; null where it has none.", examples=[[1e-6, 3e-6]]
    )


class Comparison(Answer):
    """Jobs side by side."""

    runs: list[Run]
    differences: list[SettingDifference] = Field(
        description="Settings that are not equal in all of them, except `name`, `tags` and `notes`."
    )


class History(Answer):
    """A job's history."""

    total: int = Field(ge=0, description="Step records there are in all.")
    steps: list[Annotated[OpenObject, WithJsonSchema(StepRecord.model_json_schema())]] = Field(
        description="One object per optimizer step, oldest first.", examples=[[EXAMPLE_STEP]]
    )
    evals: list[OpenObject] = Field(
        description="One object per held-out evaluation, oldest first.", examples=[[EXAMPLE_EVAL]]
    )


class _AsSampleRecord:
    """Annotation of an object that is passed on unchanged and described as a `SampleRecord`."""

    @staticmethod
    def __get_pydantic_json_schema__(_: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(SampleRecord.__pydantic_core_schema__)


class Samples(Answer):
    """A job's newest samples."""

    archived: bool = Field(
        default=False, description="Whether the job ended so long ago that its samples and events were removed."
    )
    samples: list[Annotated[OpenObject, _AsSampleRecord]] = Field(
        description="Judged groups, newest first, with texts, turns, rewards and policy versions.",
        examples=[[EXAMPLE_SAMPLE]],
    )


class Worker(Answer):
    """A worker whose heartbeat is fresh, or that the stack could not keep alive (`lost`)."""

    name: str = Field(description="Its stable name.", examples=["rollout-node1"])
    kind: WorkerKind = Field(description="The service that it is.")
    state: str = Field(description="What it does just now.", examples=["sampling"])
    job_id: str | None = Field(description="The job it works on.", examples=[EXAMPLE_JOB_ID])
    policy_version: int | None = Field(description="The policy that it holds.")
    metrics_port: int | None = Field(description="Port of its /metrics.")
    progress_age_s: float | None = Field(
        default=None, description="Seconds since its work last moved; null when it has none in hand."
    )
    detail: dict[str, str | int | float] = Field(description="What else it tells; `trouble`: why it cannot work.")
    host: str = Field(description="Its machine.", examples=["node1"])
    pid: int = Field(description="Its process id there; 0 when it has none.")
    at: float = Field(description="Unix seconds of the heartbeat, or of when it was lost.")


class WorkerList(Answer):
    """All workers that are there."""

    workers: list[Worker]


class CatalogItem(Answer):
    """A model's directory, or a data file, that a job may name."""

    name: str = Field(description="What a job writes in `model.path` or `data.train.source`.", examples=["tiny"])
    path: str = Field(description="Where it lies on the gateway's machine.")
    size_bytes: int = Field(description="Bytes of its files.")
    architecture: str = Field(description="A model's, from its config.json; else empty.", examples=["Qwen2ForCausalLM"])


class CatalogAnswer(Answer):
    """What a job here may name."""

    models: list[CatalogItem] = Field(description="Registered ones, those below the model roots, then those of hubs.")
    data: list[CatalogItem] = Field(description="Files below the data roots, then those of hubs.")
    verifiers: list[str] = Field(
        description="The built-in ones, then the installed ones.", examples=[["gsm8k", "math"]]
    )
    truncated: bool = Field(description="Whether there are more models or files than these.")


class DeadLetterInfo(Answer):
    """An entry that could not be used."""

    stage: Stage = Field(description="The stream that it was on.", examples=["rollouts"])
    id: str = Field(description="Names the letter within its stage.", examples=["1760000000000-0"])
    member: str = Field(description="Names the group that the entry was about.", examples=["train:1:17:1"])
    reason: str = Field(description="Why it could not be used.", examples=["delivered 6 times without success"])
    deliveries: int = Field(ge=0, description="How often it was delivered.", examples=[6])
    consumer: str = Field(description="The worker that gave it up.", examples=["reward-node1"])
    first_seen: float = Field(description="Unix seconds at which it was added to its stream.", examples=[1760000000.0])
    last_seen: float = Field(description="Unix seconds at which it was given up.", examples=[1760000300.5])
    size_bytes: int = Field(ge=0, description="Size of its payload.", examples=[40960])
    whole: bool = Field(description="Whether all of the payload was kept, so that it can be put back.")


class DeadLetterContent(DeadLetterInfo):
    """A dead letter with its payload."""

    payload: str = Field(description="The first 64 KiB of the payload, in Base64.", examples=["gqRuYW1l"])
    content: OpenObject | None = Field(
        description="What a payload of MessagePack says, byte strings by their length; null for any other, and beyond 64 KiB.",
        examples=[{"task": {"group_id": 17}}],
    )


class DeadLetters(Answer):
    """A job's dead letters."""

    totals: dict[str, int] = Field(
        description="Letters of each stage.", examples=[{"tasks": 0, "rollouts": 1, "scored": 0}]
    )
    letters: list[DeadLetterInfo] = Field(description="By stage, newest first.")


class Requeued(Answer):
    """An entry that is back on its stream."""

    stage: Stage = Field(description="The stream.", examples=["rollouts"])
    entry: str = Field(description="The letter that it was.", examples=["1760000000000-0"])
    member: str = Field(description="Names the group that the entry is about.", examples=["train:1:17:1"])


class Health(Answer):
    """That the process answers."""

    status: str = Field(description="`ok`.", examples=["ok"])
