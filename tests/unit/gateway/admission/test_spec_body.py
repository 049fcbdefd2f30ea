from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml
from starlette.requests import Request

from services.common.errors import ConfigError
from services.common.spec.job import JobSpec, dump_spec
from services.gateway.admission.spec_body import UnsupportedMediaType, media_type_of, parse_body

SMALL: dict[str, Any] = {
    "model": {"path": "tiny"},
    "data": {"train": {"source": "reasoning_gym:chain_sum", "config": {"p": 1e-6, "names": ["é", "😀", "a\tb/c"]}}},
    "learner": {"lr": 1e-6},
}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


async def read(body: bytes | str, content_type: str = "application/json") -> JobSpec:
    headers = [(b"content-type", content_type.encode())] if content_type else []
    media_type = media_type_of(Request({"type": "http", "method": "POST", "headers": headers}))
    return parse_body(body.encode() if isinstance(body, str) else body, media_type)


async def problems(body: bytes | str, content_type: str = "application/json") -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        await read(body, content_type)
    return {problem.field: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("content_type", ["application/yaml", "text/yaml", "Text/YAML; charset=utf-8"])
async def test_yaml_and_json_give_the_same_spec(content_type: str) -> None:
    spec = await read(json.dumps(SMALL))
    assert spec == JobSpec.model_validate(SMALL)
    assert await read(dump_spec(spec), content_type) == spec
    assert await read(json.dumps(SMALL, ensure_ascii=False), "application/json; charset=utf-8") == spec


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
async def test_another_content_type_is_refused_by_name(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="application/json, application/yaml, text/yaml"):
        await read(json.dumps(SMALL), content_type)


async def test_any_number_of_unknown_keys_is_answered_at_once() -> None:
    text = json.dumps({**SMALL, "learner": {f"lr_warmup_step_{number}": 1 for number in range(9_000)}})
    began = time.process_time()
    found = await problems(text, "application/json")
    assert time.process_time() - began < 1.0
    assert len(found) == 9_000
    assert "did you mean lr_warmup_steps" in found["learner.lr_warmup_step_0"]
    assert found["learner.lr_warmup_step_8999"] == "is not a setting"


@pytest.mark.parametrize("content_type", ["application/json", "application/yaml"])
@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"learner": {"lrr": 1}}, "learner.lrr", "is not a setting; did you mean lr?"),
        ({"lerner": {}}, "lerner", "is not a setting; did you mean learner, reward?"),
        ({"learner": {"learning_rate": 1e-6}}, "learner.learning_rate", "TRL or verl call so is learner.lr here"),
        (
            {"rollout": {"top_p": 0.9}},
            "rollout.top_p",
            "is not a setting: rollouts are sampled from the whole distribution",
        ),
        ({"learner": {"group_size": 8}}, "learner.group_size", "is not a setting here; it is rollout.group_size"),
        ({"reward": {"judges": {"a": {"endpoint": "x", "modle": "x"}}}}, "reward.judges.a.modle", "did you mean model"),
        ({"learner": {"steps": "many"}}, "learner.steps", "valid integer"),
        ({"learner": {"lr": -1}}, "learner.lr", "greater than 0"),
        ({"rollout": {"group_size": 0}}, "rollout.group_size", "greater than or equal to 1"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size", "at least 2 for algorithm.advantage_estimator grpo"),
        ({"model": {}}, "model.path", "Field required"),
        ({"data": {"train": {"source": "tasks.csv"}}}, "data.train.source", "`environment:<name>` or end in"),
        ({"eval": {"enabled": True}}, "eval.enabled", "set data.eval"),
        ({"learner": []}, "learner", "valid dictionary"),
        ({"name": "No Spaces"}, "name", "should match pattern"),
    ],
)
async def test_what_is_wrong_is_named_by_its_field(
    content_type: str, change: dict[str, Any], field: str, words: str
) -> None:
    text = (json.dumps if content_type.endswith("json") else yaml.safe_dump)({**SMALL, **change})
    found = await problems(text, content_type)
    assert list(found) == [field]
    assert words in found[field]


async def test_every_wrong_field_is_named() -> None:
    found = await problems(json.dumps({"model": {"path": 3}, "data": {}, "learner": {"lr": 9, "steps": 0}}))
    assert set(found) == {"model.path", "data.train", "learner.lr", "learner.steps"}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("", "application/json"),
        ("{", "application/json"),
        ("[1]", "application/json"),
        ("null", "application/json"),
        ("1e400", "application/json"),
        ("9" * 5000, "application/json"),
        ("[" * 100_000, "application/json"),
        (b"\xff\xfe\x00{", "application/json"),
        ('{"name": "a", "name": "b"}', "application/json"),
        ("", "application/yaml"),
        ("a: [", "application/yaml"),
        ("- 1", "application/yaml"),
        ("!!python/object/apply:os.system [id]", "application/yaml"),
        ("a: 1\n---\nb: 2", "application/yaml"),
        ("a: !!timestamp 2024-13-45", "application/yaml"),
        ("a: !!binary aGk=", "application/yaml"),
        ("a: !!set {b}", "application/yaml"),
        ("a: 1\na: 2", "application/yaml"),
        (nested(900), "application/json"),
        ("[" + "1," * 30_000 + "1]", "application/json"),
        ("{[a]: b}", "application/yaml"),
        ("\0", "application/yaml"),
        (b"\xff\xfe\x00a", "application/yaml"),
        ("[" * 100_000, "application/yaml"),
        ("a: &a [*a]", "application/yaml"),
        ("[" + "1," * 30_000 + "1]", "application/yaml"),
    ],
)
async def test_a_body_that_is_no_document_names_the_spec(body: bytes | str, content_type: str) -> None:
    assert list(await problems(body, content_type)) == ["spec"]


async def test_a_small_body_that_unfolds_into_a_large_one_is_refused_early() -> None:
    levels = "\n".join(f"    l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))
    text = f"model: {{path: tiny}}\ndata:\n  train:\n   source: a.jsonl\n   config:\n    l0: &l0 [x]\n{levels}"
    assert "aliases" in (await problems(text, "application/yaml"))["spec"]


@pytest.mark.parametrize(
    ("config", "content_type", "field"),
    [
        ('{"a": NaN}', "application/json", "spec"),
        ('{"a": "\\ud800"}', "application/json", "spec"),
        ('{"\\udfff": 1}', "application/json", "spec"),
        ("{a: .nan}", "application/yaml", "data.train.config"),
        ('{a: "\\ud800"}', "application/yaml", "spec"),
        ("{1: b}", "application/yaml", "data.train.config"),
    ],
)
async def test_free_form_settings_must_be_json_values(config: str, content_type: str, field: str) -> None:
    text = f'{{"model": {{"path": "tiny"}}, "data": {{"train": {{"source": "a.jsonl", "config": {config}}}}}}}'
    found = await problems(text, content_type)
    assert all(name.startswith(field) for name in found)
    assert found


@pytest.mark.parametrize("content_type", ["application/json", "application/yaml"])
async def test_a_key_given_twice_is_named_with_its_line(content_type: str) -> None:
    body = '{"learner": {"steps": 1,\n "steps": 2}}'
    message = (await problems(body, content_type))["spec"]
    assert "key 'steps' is given twice" in message
    assert "line 2" in message or content_type.endswith("json")


@pytest.mark.parametrize(
    "body", ["[" + "1:59:59," * 131_000 + "1]", "a:\n" + "- 1:59:59\n" * 104_000, "a: " + "1:59:" * 209_000 + "1"]
)
async def test_a_mebibyte_of_base_60_integers_costs_less_than_a_second(body: str) -> None:
    started = time.process_time()
    assert list(await problems(body, "application/yaml")) == ["spec"]
    assert time.process_time() - started < 1.0
