"""Imports as a whole: every key has one line, and the spec is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.imports.convert import Request, SourceName, convert
from services.cli.imports.inputs.keys import read_yaml
from services.cli.imports.mindspeed import table as mindspeed
from services.cli.imports.result import Imported, Outcome, report, summary
from services.cli.imports.verl import table as verl
from services.common.errors import ConfigError, Problem
from services.common.spec.job import parse_spec

FILES = Path(__file__).parent / "files"
ENVIRONMENT = {"HOME": "/home/u"}
ALL = sorted(path.name for path in FILES.iterdir())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 64),
    st.sampled_from(["grpo", "gae", "rloo", "gspo", "constant", "cosine"]),
)


def imported(name: str, *overrides: str, **options: Any) -> Imported:
    path = FILES / name
    options |= {"script" if path.suffix == ".sh" else "file": path}
    return convert(Request(overrides=overrides, **options), ENVIRONMENT)


def keys_of(table: Any) -> list[str]:
    source = table.SOURCE if table is mindspeed else table.source(megatron=False)
    return sorted(
        {*source.fields, *source.fixed, *source.defaults} | {key for key in source.left_out if "*" not in key}
    )


@pytest.mark.parametrize("name", ALL)
def test_the_spec_of_a_published_file_is_valid(name: str) -> None:
    found = imported(name)
    assert found.problems == ()
    assert parse_spec(found.text).model_dump(exclude_unset=True, mode="json").keys() == found.document.keys()


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith(".yaml")])
def test_a_file_has_as_many_lines_as_keys(name: str) -> None:
    found = imported(name)
    assert [line.key for line in found.lines] == list(read_yaml(FILES / name))


@pytest.mark.parametrize("name", ALL)
def test_no_key_of_a_published_file_is_unknown(name: str) -> None:
    assert [line.key for line in imported(name).of(Outcome.UNKNOWN)] == []


@pytest.mark.parametrize("name", ALL)
def test_every_field_comes_from_a_key_or_a_default(name: str) -> None:
    found = imported(name)
    sources = {field for line in (*found.lines, *found.defaults) for field in line.fields}
    spec = parse_spec(found.text).model_dump(exclude_unset=True, mode="json")
    for field in sources:
        part: Any = spec
        for key in field.split("."):
            part = part[key]


@pytest.mark.parametrize("table", [verl, mindspeed])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_key_of_the_input_is_reported_once(table: Any, data: st.DataObject) -> None:
    known = data.draw(st.lists(st.sampled_from(keys_of(table)), unique=True, max_size=30))
    unknown = data.draw(st.lists(st.sampled_from(["trainer.typo", "rl_config.typo", "data.x.y", "zzz"]), unique=True))
    chosen = [key for key in (*known, *unknown) if key != "megatron_training.stage"]
    overrides = tuple(f"{key}={str(data.draw(SCALARS)).replace('None', 'null')}" for key in chosen)
    name = SourceName.MINDSPEED_RL if table is mindspeed else SourceName.VERL
    request = Request(overrides=(*overrides, "trainer.nnodes=1"), source=name)
    found: Imported | None = None
    refused: tuple[Problem, ...] = ()
    try:
        found = convert(request, ENVIRONMENT)
    except ConfigError as error:
        refused = error.problems
    if found is None:
        assert refused
        assert all(problem.field in chosen for problem in refused)
        return
    assert sorted(line.key for line in found.lines) == sorted({*chosen, "trainer.nnodes"})
    assert {line.key for line in found.of(Outcome.UNKNOWN)} >= set(unknown)
    assert not {line.key for line in found.of(Outcome.UNKNOWN)} & (set(known) - {"trainer.nnodes"})


def test_an_unknown_key_is_named() -> None:
    found = imported("ppo_gsm8k_verl.sh", "trainer.typo=5")
    assert [line.key for line in found.of(Outcome.UNKNOWN)] == ["trainer.typo"]
    assert summary(found).endswith("1 unknown (trainer.typo)")
    assert "unknown   trainer.typo: 5" in report(found)


def test_a_value_of_the_wrong_type_names_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        imported("ppo_gsm8k_verl.sh", "actor_rollout_ref.actor.optim.lr=high", "actor_rollout_ref.rollout.n=2.5")
    assert {problem.field for problem in caught.value.problems} == {
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.rollout.n",
    }


def test_a_problem_names_the_field_and_its_key() -> None:
    found = imported("ppo_gsm8k_verl.sh", "actor_rollout_ref.actor.optim.lr=2")
    (problem,) = found.problems
    assert problem.field == "learner.lr"
    assert problem.message.endswith("from actor_rollout_ref.actor.optim.lr")


def test_an_override_goes_over_the_file() -> None:
    found = imported("dapo_mindspeed.yaml", "actor_config.lr=2e-6", "+rl_config.verifier_timeout=9")
    spec = parse_spec(found.text)
    assert (spec.learner.lr, spec.reward.timeout_s) == (2e-6, 9.0)


def test_a_change_of_the_spec_goes_over_all() -> None:
    found = imported(
        "dapo_mindspeed.yaml",
        changes=("data.train.source=dapo-math-17k.parquet", 'reward.verifiers={"*": math}', "name=mine"),
    )
    spec = parse_spec(found.text)
    assert (spec.data.train.source, spec.reward.verifiers, spec.name) == (
        "dapo-math-17k.parquet",
        {"*": "math"},
        "mine",
    )
    assert "# --set" in found.text


def test_a_value_that_only_running_would_give_is_reported_and_its_default_counts() -> None:
    found = imported("ppo_gsm8k_verl.sh")
    script = FILES / "ppo_gsm8k_verl.sh"
    opened = convert(Request(script=script, overrides=("actor_rollout_ref.rollout.n=???",)), ENVIRONMENT)
    (line,) = [line for line in opened.lines if line.key == "actor_rollout_ref.rollout.n"]
    assert line.outcome is Outcome.DIFFERS
    assert parse_spec(opened.text).rollout.group_size == parse_spec(found.text).rollout.group_size == 1


def test_a_deleted_key_takes_its_default_with_it() -> None:
    found = imported("ppo_gsm8k_verl.sh", "~actor_rollout_ref.actor.clip_ratio_c")
    assert parse_spec(found.text).algorithm.dual_clip is None
    assert "~actor_rollout_ref.actor.clip_ratio_c" in {line.key for line in found.of(Outcome.LEFT_OUT)}


@pytest.mark.parametrize("overrides", [(), ("x.y=1",)])
def test_what_is_of_no_known_source_is_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        convert(Request(overrides=overrides), ENVIRONMENT)


def test_the_same_input_gives_the_same_text() -> None:
    assert imported("dapo_verl.sh").text == imported("dapo_verl.sh").text
