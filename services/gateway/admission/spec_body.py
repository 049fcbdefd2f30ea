"""Body of a request as a job spec: JSON or YAML, with one model; constructs that a hostile body could expand are refused first."""

from __future__ import annotations

import json

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from starlette.requests import Request

from services.common.errors import ConfigError
from services.common.spec.data import DataSourceSpec
from services.common.spec.document import parse_document, parse_json
from services.common.spec.job import JobSpec, problems_of

JSON_TYPE = "application/json"
YAML_TYPES = ("application/yaml", "text/yaml")
MEDIA_TYPES = (JSON_TYPE, *YAML_TYPES)

_SETTINGS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue], config=ConfigDict(allow_inf_nan=False))


class UnsupportedMediaType(ConfigError):  # noqa: N818  HTTP's name
    """A body of another media type; answered with 415."""


def media_type_of(request: Request) -> str:
    """The media type of the body, one of MEDIA_TYPES. Raises UnsupportedMediaType for any other."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        known = ", ".join(MEDIA_TYPES)
        raise UnsupportedMediaType(f"Content-Type must be one of {known}; it is {media_type or 'missing'}")
    return media_type


def parse_body(body: bytes, media_type: str) -> JobSpec:
    """The spec in a body, in well below a second for each MiB of any content. Raises ConfigError for wrong fields."""
    try:
        document = (parse_json if media_type == JSON_TYPE else parse_document)(body)
    except ConfigError as error:
        raise ConfigError(f"the body {error}", field="spec") from error
    if not isinstance(document, dict):
        raise ConfigError(f"must be an object with `model` and `data`, not {type(document).__name__}", field="spec")
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, JobSpec)) from error
    _check_storable(spec)
    return spec


def _check_storable(spec: JobSpec) -> None:
    """The free-form settings must be JSON values, and the whole spec must be storable."""
    problems = []
    for name, source in (("train", spec.data.train), ("eval", spec.data.eval)):
        try:
            _SETTINGS.validate_python(source.config if source else {})
        except ValidationError as error:
            problems += problems_of(error, DataSourceSpec, f"data.{name}.config.")
    if problems:
        raise ConfigError(*problems)
    try:
        document = json.dumps(spec.model_dump(), ensure_ascii=False, allow_nan=False)
        document.encode()  # halves of surrogate pairs fail here
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be stored as JSON: {error}", field="spec") from error
