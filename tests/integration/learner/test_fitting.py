"""With `data.filter_overlong_prompts` a job draws the tasks whose prompts fit, in an order that a restart does not change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.errors import DataError
from services.common.models.prompts import PromptEncoder
from services.common.sandbox.pool import Sandbox
from services.learner.groups import fitting
from services.learner.groups.data import JobData
from services.learner.groups.sources import Sources
from tests.tiny_model import write_tiny_model
from tests.unit.learner.scored_groups import job_spec

CONTEXT, RESPONSE = 64, 24
ROWS = [f"{'7' * count} +" for count in (2, 60, 5, *range(30, 40), 1, 70)]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `prepare` does to a child's imports must not happen here."""
    monkeypatch.setattr(fitting, "prepare", lambda: None)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(home=tmp_path)
    write_tiny_model(made.models_dir / "tiny")
    (tmp_path / "data").mkdir()
    rows = [{"prompt": row, "ground_truth": "1", "data_source": "gsm8k"} for row in ROWS]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return made


def sources(settings: Settings, **data: Any) -> Sources:
    return Sources(spec_json(**data), settings.public())


def spec_json(**data: Any) -> str:
    section = {"train": {"source": "rows.jsonl"}, "filter_overlong_prompts": True} | data
    return job_spec(
        data=section, model={"path": "tiny", "max_model_len": CONTEXT}, rollout={"rollout_max_tokens": RESPONSE}
    ).model_dump_json()


def prompts(opened: Sources) -> list[str]:
    return [opened.train[index].prompt[0].content for index in range(len(opened.train))]


def test_those_and_only_those_prompts_are_kept_that_leave_room_for_a_whole_response(settings: Settings) -> None:
    encoder = PromptEncoder(settings.models_dir / "tiny")
    lengths = {row: len(encoder.encode([("user", row)], 10_000)) for row in ROWS}
    room = CONTEXT - RESPONSE
    assert {length - room for length in lengths.values()} >= {0, 1}, "the rows must meet the limit from both sides"
    assert prompts(sources(settings)) == [row for row in ROWS if lengths[row] <= room]
    assert prompts(sources(settings, filter_overlong_prompts=False)) == ROWS


def test_a_restart_counts_nothing_again_and_draws_the_same(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sources(settings)
    before = first.open_train(), prompts(first)
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "PromptEncoder", None)
        again = sources(settings)
        assert (again.open_train(), prompts(again)) == before
    (cached,) = (settings.home / "cache" / "prompts").iterdir()
    for content in (b"", b"\x93NUMPY torn", cached.read_bytes()[:-3]):
        cached.write_bytes(content)
        torn = sources(settings)
        assert (torn.open_train(), prompts(torn)) == before


def test_the_fingerprint_tells_filtered_tasks_from_all_and_from_those_of_another_limit(settings: Settings) -> None:
    found = {sources(settings, filter_overlong_prompts=on).open_train()["fingerprint"] for on in (True, False)}
    other = job_spec(
        data={"train": {"source": "rows.jsonl"}, "filter_overlong_prompts": True},
        model={"path": "tiny", "max_model_len": CONTEXT - 6}, rollout={"rollout_max_tokens": RESPONSE},
    )  # fmt: skip
    found.add(Sources(other.model_dump_json(), settings.public()).open_train()["fingerprint"])
    assert len(found) == 3


def test_a_source_without_a_prompt_that_fits_is_refused_by_its_field(settings: Settings) -> None:
    (settings.home / "data" / "rows.jsonl").write_text(
        json.dumps({"prompt": "7" * 99, "ground_truth": "1", "data_source": "gsm8k"}) + "\n"
    )
    with pytest.raises(DataError, match=r"^data\.train: no prompt has at most 40 tokens"):
        sources(settings).open_train()


async def test_a_job_draws_each_task_that_fits_once_an_epoch(settings: Settings) -> None:
    expected = prompts(sources(settings))
    async with Sandbox() as sandbox:
        data = JobData(sandbox, job_spec(**json.loads(spec_json())), settings)
        await data.open()
        drawn = [(await data.training(ordinal)).prompt[0].content for ordinal in range(len(expected))]
        await data.close()
    assert sorted(drawn) == sorted(expected)


def test_the_imports_of_this_process_are_left_alone() -> None:
    assert sys.modules.get("torch", "not imported") is not None
