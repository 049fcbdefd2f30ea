"""References to hubs: their forms, and what a spec says of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.spec.job import JobSpec, dump_spec, parse_recorded_spec
from services.common.spec.reference import Reference, parse_reference

COMMIT = "7ae557604adf67be50417f59c2c2f167def9a775"
SPEC: dict[str, Any] = {
    "model": {"path": "hf:org/model@main"},
    "reference": {"path": "modelscope:org/other"},
    "data": {"train": {"source": "hf:org/data@~parquet/main/train/0000.parquet"}, "eval": {"source": "local.jsonl"}},
}


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("hf:org/name", Reference("hf", "org/name")),
        ("modelscope:Qwen/Qwen3-0.6B@v1.0", Reference("modelscope", "Qwen/Qwen3-0.6B", "v1.0")),
        ("hf:org/name@refs%2Fpr%2F1", Reference("hf", "org/name", "refs/pr/1")),
        ("hf:org/name@refs/pr/1", Reference("hf", "org/name", "refs/pr/1")),
        ("hf:o/n@~parquet/a/0.parquet", Reference("hf", "o/n", "refs/convert/parquet", "a/0.parquet")),
        ("hf:o/n/a/b.jsonl", Reference("hf", "o/n", "", "a/b.jsonl")),
    ],
)
def test_a_reference_says_hub_repository_revision_and_file(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "hf:name", "hf:org/", "hf:../name", "hf:org/..", "hf:org/a..b", "hf:org/name@", "hf:org/name@a b", "hf:org/name@../x",
        "hf:o/n/../x.jsonl", "hf:o/n//x.jsonl", "hf:o/n/a\\b.jsonl", "hf://org/name", "https://host/org/name",
        "hf:org/name\n", "hf:org/na\0me",
    ],
)  # fmt: skip
def test_what_could_lead_elsewhere_is_no_reference(text: str) -> None:
    with pytest.raises(ValueError, match=r"no (reference|path|revision)"):
        parse_reference(text)


def test_only_a_full_commit_is_resolved() -> None:
    assert Reference("hf", "o/n", COMMIT).resolved
    assert not any(Reference("hf", "o/n", revision).resolved for revision in ("", "main", COMMIT[:8], COMMIT.upper()))


def test_a_spec_names_its_references_by_field_and_takes_their_commits() -> None:
    spec = JobSpec.model_validate(SPEC)
    assert {field: str(reference) for field, reference in spec.references.items()} == {
        "model.path": "hf:org/model@main",
        "reference.path": "modelscope:org/other",
        "data.train.source": "hf:org/data@refs%2Fconvert%2Fparquet/main/train/0000.parquet",
    }
    pinned = spec.with_references({field: reference.at(COMMIT) for field, reference in spec.references.items()})
    assert pinned.model.path == f"hf:org/model@{COMMIT}"
    assert pinned.data.train.source == f"hf:org/data@{COMMIT}/main/train/0000.parquet"
    assert pinned.model_copy(update={"model": spec.model, "reference": spec.reference, "data": spec.data}) == spec
    assert parse_recorded_spec(dump_spec(pinned)) == pinned


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("model", {"path": "hf:org/model/config.json"}, "names a file"),
        ("critic", {"path": "hf:model"}, "is no reference to a hub"),
        ("reference", {"path": "modelscope:a/b/c"}, "names a file"),
        ("data", {"train": {"source": "hf:data.jsonl"}}, "is no reference to a hub"),
    ],
)
def test_a_field_with_another_form_is_an_error_of_that_field(section: str, value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        JobSpec.model_validate(SPEC | {section: value})
    assert caught.value.errors()[0]["loc"][0] == section
