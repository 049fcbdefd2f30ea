"""Judge endpoints: the OpenAI-compatible servers that the operator lets jobs use, by name. A job never names an address.

MILLRACE_JUDGE_ENDPOINTS='{"local": {"url": "http://10.0.0.7:8000/v1", "model": "qwen3-32b", "key_file": "/run/secrets/judge_key"}}'
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from services.common.errors import ConfigError, Problem, did_you_mean
from services.common.spec.scorers import JudgeSpec, Name

VARIABLE = "MILLRACE_JUDGE_ENDPOINTS"


class JudgeEndpoint(BaseModel):
    """One endpoint. It holds no key, only where the reward service finds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="Base address, as clients of OpenAI's API take it: http://host:8000/v1.")
    model: str | None = Field(default=None, min_length=1, max_length=256, description="Model of jobs that name none.")
    key_file: Path | None = Field(default=None, description="File that holds the API key.")
    key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="Environment variable of the reward service that holds the API key."
    )
    length_parameter: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="Name that the server gives the limit of an answer."
    )
    requests_at_once: int = Field(
        default=32, ge=1, le=4096, description="Requests in flight from one reward server, of all jobs."
    )
    requests_per_minute: float | None = Field(
        default=None, gt=0, le=1e6, description="Requests that one reward server begins in a minute."
    )

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("is no http:// or https:// address")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("has a user, a query or a fragment: give the key by key_file or key_variable")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_file is not None and self.key_variable is not None:
            raise ValueError("has both key_file and key_variable")
        return self

    def read_key(self, name: str) -> SecretStr | None:
        """The API key, or None where there is none; `name`: the endpoint's. Raises ConfigError when it is named and cannot be had."""
        if self.key_file is not None:
            where = f"{VARIABLE}: {name}.key_file: {self.key_file}"
            try:
                key = self.key_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{where} cannot be read: {getattr(error, 'strerror', 'not text')}") from error
        elif self.key_variable is not None:
            where, key = f"{VARIABLE}: {name}.key_variable: {self.key_variable}", os.environ.get(self.key_variable, "")
        else:
            return None
        if not key:
            raise ConfigError(f"{where} is empty")
        if not key.isascii() or not key.isprintable():
            raise ConfigError(f"{where} is not one line of ASCII")
        return SecretStr(key)


Endpoints = Annotated[dict[Name, JudgeEndpoint], Field(max_length=256)]


def check_judges(judges: Mapping[str, JudgeSpec], endpoints: Mapping[str, JudgeEndpoint]) -> None:
    """Checks that every judge of a job has its endpoint, and a model there. Raises ConfigError with each wrong field."""
    problems = [problem for name, judge in judges.items() for problem in _problems(name, judge, endpoints)]
    if problems:
        raise ConfigError(*problems)


def _problems(name: str, judge: JudgeSpec, endpoints: Mapping[str, JudgeEndpoint]) -> Iterable[Problem]:
    endpoint = endpoints.get(judge.endpoint)
    if endpoint is None:
        known = sorted(endpoints)
        listed = f"there are {', '.join(known)}" if known else f"there are none ({VARIABLE} of this installation)"
        message = f"there is no judge endpoint {judge.endpoint!r}; {listed}{did_you_mean(judge.endpoint, known)}"
        yield Problem(f"reward.judges.{name}.endpoint", message)
    elif judge.model is None and endpoint.model is None:
        message = f"is needed: endpoint {judge.endpoint!r} has no model of its own"
        yield Problem(f"reward.judges.{name}.model", message)
