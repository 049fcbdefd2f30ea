"""Types of a job spec: nothing is taken for a number, a text or a truth value that is not one."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from services.common.errors import ConfigError
from services.common.spec.job import JobSpec, dump_spec, parse_recorded_spec, parse_spec

SMALL: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}


def fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type without None, and default of every plain field of the sections."""
    for name, field in model.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
        kind = kinds[0] if get_origin(field.annotation) is UnionType else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, (*path, name))
        else:
            yield ".".join((*path, name)), kind, field.get_default(call_default_factory=False)


FIELDS = list(fields(JobSpec))
WRONG: dict[Any, list[object]] = {
    int: [True, False, "5", 5.0, 5.5, None, [5], {}],
    float: [True, "0.5", "1e-5", [0.5]],
    bool: [0, 1, "true", "yes", "on", 1.0, []],
    str: [1, True, 1.5, ["a"]],
}


def with_value(path: str, value: object) -> dict[str, Any]:
    document: dict[str, Any] = {name: dict(section) for name, section in SMALL.items()}
    *sections, name = path.split(".")
    section = document
    for key in sections:
        section[key] = dict(section.get(key) or {})
        section = section[key]
    if path.startswith("data.eval."):
        section.setdefault("source", "a.jsonl")
    section[name] = value
    return document


def problems(document: dict[str, Any]) -> dict[str, str]:
    try:
        JobSpec.model_validate(document)
    except ValidationError as error:
        return {".".join(str(part) for part in item["loc"]): item["msg"] for item in error.errors()}
    return {}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (path, wrong)
        for path, kind, default in FIELDS
        for wrong in WRONG.get(kind, [])
        if wrong is not None or default is not None
    ],
)
def test_a_value_of_another_type_names_its_field(path: str, wrong: object) -> None:
    assert path in problems(with_value(path, wrong))


def test_every_kind_of_field_is_tried() -> None:
    assert {kind for _, kind, _ in FIELDS} >= {int, float, bool}
    assert len(FIELDS) > 80


@pytest.mark.parametrize(
    ("path", "kind"), [(path, kind) for path, kind, _ in FIELDS if isinstance(kind, type) and issubclass(kind, StrEnum)]
)
def test_a_choice_is_made_by_its_text(path: str, kind: type[StrEnum]) -> None:
    """A field of a StrEnum needs strict=False."""
    for choice in kind:
        assert path not in problems(with_value(path, choice.value))
    assert path in problems(with_value(path, "none of them"))


def test_an_integer_is_fine_where_a_float_is_wanted() -> None:
    spec = JobSpec.model_validate(with_value("learner.lr", 1))
    assert spec.learner.lr == 1.0
    assert isinstance(spec.learner.lr, float)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("steps: true", "learner.steps"),
        ('steps: "5"', "learner.steps"),
        ("steps: 1e3", "learner.steps"),
        ("steps: 0x10", ""),
        ("shared_prompts: on", "learner.shared_prompts"),
        ("shared_prompts: false", ""),
        ("lr: 1e-5", ""),
        ('lr: "1e-5"', "learner.lr"),
    ],
)
def test_yaml_and_the_types_agree(text: str, field: str) -> None:
    body = f"model: {{path: tiny}}\ndata: {{train: {{source: a.jsonl}}}}\nlearner: {{{text}}}"
    if field:
        with pytest.raises(ConfigError, match=rf"^{field}: Input should be a valid"):
            parse_spec(body)
    else:
        parse_spec(body)


def test_a_recorded_spec_reads_back_by_every_way() -> None:
    spec = JobSpec.model_validate(SMALL)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert parse_recorded_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize("packing", [False, True])
def test_a_job_of_a_release_without_shared_prompts_keeps_its_rows(packing: bool) -> None:
    recorded = dump_spec(JobSpec.model_validate(SMALL)).replace("  shared_prompts: true\n", "")
    recorded = recorded.replace("packing: false", f"packing: {str(packing).lower()}")
    learner = parse_recorded_spec(recorded).learner
    assert (learner.shared_prompts, learner.packing) == (False, packing)
    assert parse_recorded_spec(dump_spec(parse_recorded_spec(recorded))).learner == learner


def test_positions_are_split_only_over_several_ranks() -> None:
    body = "model: {path: tiny}\ndata: {train: {source: a.jsonl}}\nlearner: {sequence_parallel: true"
    with pytest.raises(ConfigError, match=r"^learner\.sequence_parallel: .* tensor_parallel_size must be"):
        parse_spec(body + "}")
    assert parse_spec(body + ", tensor_parallel_size: 4}").learner.row_multiple == 4
    assert parse_spec("model: {path: tiny}\ndata: {train: {source: a.jsonl}}").learner.row_multiple == 1


def test_a_new_job_is_told_what_has_replaced_packing() -> None:
    with pytest.raises(ConfigError, match=r"^learner\.packing: is replaced by shared_prompts"):
        parse_spec("model: {path: tiny}\ndata: {train: {source: a.jsonl}}\nlearner: {packing: true}")
