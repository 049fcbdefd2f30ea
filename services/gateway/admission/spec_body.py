"""A request's body as a job spec: JSON or YAML, the same model, with what a hostile body could blow up refused first."""

from __future__ import annotations

import json
import re

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from starlette.requests import Request

from services.common.errors import ConfigError
from services.common.spec.document import parse_document, parse_json
from services.common.spec.job import JobSpec, describe_errors
from services.gateway.errors import SpecRefused
from services.gateway.schemas import FieldProblem

JSON_TYPE = "application/json"
YAML_TYPES = ("application/yaml", "text/yaml")
MEDIA_TYPES = (JSON_TYPE, *YAML_TYPES)

_SETTINGS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue], config=ConfigDict(allow_inf_nan=False))
_LINE = re.compile(r"([a-z_]+(?:\.[A-Za-z0-9_*]+)+(?:\[[^\]]*\])?): (.+)", re.DOTALL)
"""`model.path: …`, `reward.verifiers['my/data']: …`"""


class UnsupportedMediaType(ConfigError):  # noqa: N818  HTTP's own name
    """A body of a type that is not read here; answered with 415."""


def media_type_of(request: Request) -> str:
    """The media type of the body, one of MEDIA_TYPES.

    Raises:
        UnsupportedMediaType: neither JSON nor YAML.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        known = ", ".join(MEDIA_TYPES)
        raise UnsupportedMediaType(f"Content-Type must be one of {known}; it is {media_type or 'missing'}")
    return media_type


def parse_body(body: bytes, media_type: str) -> JobSpec:
    """The spec in a body of one of MEDIA_TYPES; takes well below a second for each MiB, whatever it holds.

    Raises:
        SpecRefused: names every wrong field.
    """
    try:
        document = (parse_json if media_type == JSON_TYPE else parse_document)(body)
    except ConfigError as error:
        raise _refused("spec", f"the body {error}") from error
    if not isinstance(document, dict):
        raise _refused("spec", f"must be an object with `model` and `data`, not {type(document).__name__}")
    try:
        return _storable(JobSpec.model_validate(document))
    except ValidationError as error:
        raise SpecRefused(_validation_problems(error)) from error


def problems_of(error: ConfigError, field: str) -> list[FieldProblem]:
    """An error's lines as problems; `field` stands for lines that name none themselves."""
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        return _validation_problems(cause)
    problems = []
    for line in str(error).splitlines() or [""]:
        match = _LINE.fullmatch(line)
        named, message = match.groups() if match else (field, line)
        problems.append(FieldProblem(field=named, message=message))
    return problems


def _storable(spec: JobSpec) -> JobSpec:
    """The spec, once it is sure that the free-form settings are JSON values and all of it can be stored."""
    problems = []
    for name, source in (("train", spec.data.train), ("eval", spec.data.eval)):
        try:
            _SETTINGS.validate_python(source.config if source else {})
        except ValidationError as error:
            problems += _validation_problems(error, f"data.{name}.config.")
    if problems:
        raise SpecRefused(problems)
    try:
        json.dumps(
            spec.model_dump(), ensure_ascii=False, allow_nan=False
        ).encode()  # halves of surrogate pairs fail here
    except (ValueError, RecursionError) as error:
        raise _refused("spec", f"cannot be stored as JSON: {error}") from error
    return spec


def _validation_problems(error: ValidationError, prefix: str = "") -> list[FieldProblem]:
    problems = []
    for item, line in zip(error.errors(include_url=False, include_context=False), describe_errors(error), strict=True):
        path = ".".join(str(part) for part in item["loc"]) or "spec"
        problems.append(FieldProblem(field=f"{prefix}{path}", message=line.removeprefix(f"{path}: ")))
    return problems


def _refused(field: str, message: str) -> SpecRefused:
    return SpecRefused([FieldProblem(field=field, message=message)])
