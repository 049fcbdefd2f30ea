"""Messages between the head and the weights' process: one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from services.common.weights.snapshot import PolicyVersion


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Serve(_Message):
    """The first line: what to serve, and where. The token travels here, in no argument and no variable."""

    job_id: str
    host: str
    advertise_host: str | None
    token: str | None
    log_level: str


class Publish(_Message):
    """A version lies in this file, which nobody changes any more."""

    kind: Literal["publish"] = "publish"
    version: PolicyVersion
    path: str


class BeginTurn(_Message):
    """The learner wants to compute on devices that it shares with the servers."""

    kind: Literal["begin_turn"] = "begin_turn"
    limit_s: float


class Serving(_Message):
    """It serves at this address."""

    kind: Literal["serving"] = "serving"
    address: str


class Published(_Message):
    """The version is announced; `digest`: of its manifest, hex."""

    kind: Literal["published"] = "published"
    version: PolicyVersion
    digest: str


class Reported(_Message):
    """What a rollout server made of a version; seconds."""

    kind: Literal["reported"] = "reported"
    server: str
    version: PolicyVersion
    error: str
    fetch_s: float
    pause_s: float


class TurnBegun(_Message):
    """No server samples, but these."""

    kind: Literal["turn_begun"] = "turn_begun"
    missing: list[str]


class Refused(_Message):
    """It ends: the address cannot be served, or the version cannot be published."""

    kind: Literal["refused"] = "refused"
    error: str


Order = Annotated[Publish | BeginTurn, Field(discriminator="kind")]
ORDER: TypeAdapter[Order] = TypeAdapter(Order)
Answer = Annotated[Serving | Published | TurnBegun | Reported | Refused, Field(discriminator="kind")]
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)
