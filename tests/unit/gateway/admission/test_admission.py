"""Admission: whatever a job brings, its submission is answered in time and names the field; nothing of it runs in the gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from pydantic import SecretStr

from services.common.config.settings import Programs, Settings
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Sandbox
from services.common.service.process_tree import family
from services.common.spec.job import JobSpec
from services.gateway.admission import admission as module
from services.gateway.admission.admission import MAX_CONCURRENT_CHECKS, Admission
from services.gateway.errors import AdmissionBusy, SpecRefused

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRIALS = "tests.unit.gateway.trials"
DOCUMENT: dict[str, Any] = {
    "model": {"path": "tiny"},
    "data": {"train": {"source": "a.jsonl"}, "eval": {"source": "b.jsonl"}},
    "reward": {"verifiers": {"of-train": "gsm8k", "of-eval": "math"}},
}
SPEC = JobSpec.model_validate(DOCUMENT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(prepare=["services.gateway.admission.checks:prepare"]) as shared:
        await shared.start()
        yield shared


async def found(
    sandbox: Sandbox, trial: str, *, deadline_s: float = 20.0, **changes: Any
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """What was wrong, and what was not checked."""
    admission = Admission(
        sandbox, Settings(token=SecretStr("t" * 40)), deadline_s=deadline_s, checks=f"{TRIALS}:{trial}"
    )
    try:
        return [], await admission.admit(JobSpec.model_validate(DOCUMENT | changes))
    except SpecRefused as refusal:
        return [(problem.field, problem.message) for problem in refusal.problems], ()


async def test_a_good_spec_is_admitted_whole(sandbox: Sandbox) -> None:
    assert await found(sandbox, "Good") == ([], ())


async def test_all_that_is_wrong_is_told_at_once_with_its_field(sandbox: Sandbox) -> None:
    problems, _ = await found(sandbox, "Wrong")
    assert problems[:3] == [
        ("learner.tensor_parallel_size", "4 does not divide 9"),
        ("model.path", "and more: of it"),
        ("data.eval.source", "/data/b.jsonl: row 3: `answer` is missing"),
    ]
    [(field, message)] = problems[3:]
    assert field == "data.train.data_source"
    assert "no verifier is known for data_source 'strange'" in message


async def test_an_unknown_verifier_is_told_once(sandbox: Sandbox) -> None:
    [(field, message)], _ = await found(sandbox, "Good", reward={"verifiers": {"mine": "gsm9k"}})
    assert field == "reward.verifiers['mine']"
    assert message.startswith("there is no verifier 'gsm9k'")


async def test_judges_without_an_endpoint_and_directories_without_a_reward_model_name_their_fields(
    sandbox: Sandbox,
) -> None:
    reward = {
        "verifiers": {"*": "graded"}, "judges": {"graded": {"endpoint": "far"}}, "reward_models": {"scored": {"path": "rm"}}
    }  # fmt: skip
    [(field, message)], _ = await found(sandbox, "Good", reward=reward)
    assert (field, "there is no judge endpoint 'far'" in message) == ("reward.judges.graded.endpoint", True)
    problems, _ = await found(sandbox, "Wrong", reward=reward)
    assert ("reward.reward_models.scored.path", "scored has 2 labels") in problems


async def test_held_out_tasks_need_no_verifier_of_training(sandbox: Sandbox) -> None:
    reward = {"verifiers": {"of-train": "gsm8k"}, "eval_verifiers": {"of-eval": "math"}}
    assert await found(sandbox, "Good", reward=reward) == ([], ())
    [(field, message)], _ = await found(
        sandbox, "Good", reward={"verifiers": {"of-eval": "math"}, "eval_verifiers": {"*": "math"}}
    )
    assert field == "data.train.data_source"
    assert "no verifier is known for data_source 'of-train'" in message


async def test_every_wrong_name_of_a_reward_is_told_with_its_field(sandbox: Sandbox) -> None:
    rubric = {"verifier_function": ["math", "gsm9k"], "verifier_weight": [1.0, 0.5]}
    reward = {
        "verifiers": {"*": "mine"},
        "rubrics": {"mine": rubric, "gsm8k": rubric},
        "config": {"code": {"code_run_s": -1}},
    }
    problems, _ = await found(sandbox, "Good", reward=reward)
    assert [field for field, _ in problems] == [
        "reward.rubrics.gsm8k", "reward.rubrics.mine.verifier_function", "reward.rubrics.gsm8k.verifier_function",
        "reward.config.code.code_run_s",
    ]  # fmt: skip


async def test_programs_of_a_model_are_refused_until_the_operator_allows_them(sandbox: Sandbox) -> None:
    problems, _ = await found(sandbox, "Good", reward={"verifiers": {"*": "code"}})
    assert [field for field, _ in problems] == ["reward.verifiers['*']"]
    assert "MILLRACE_CODE_REWARD=1" in problems[0][1]
    allowed = Settings(token=SecretStr("t" * 40), code_reward=Programs.ISOLATED)
    spec = JobSpec.model_validate(DOCUMENT | {"reward": {"verifiers": {"*": "code"}}})
    assert await Admission(sandbox, allowed, checks=f"{TRIALS}:Good").admit(spec) == ()


async def test_a_file_that_is_not_read_in_time_is_left_to_the_learner_and_the_others_still_refuse(
    sandbox: Sandbox,
) -> None:
    began = time.monotonic()
    problems, _ = await found(sandbox, "Endless", deadline_s=2.0)
    assert time.monotonic() - began < 4.0
    assert problems == [("data.eval.source", "/data/b.jsonl: has no rows")]
    assert await found(sandbox, "EndlessModel", deadline_s=1.5) == ([], ("model.path",))


async def test_a_file_that_was_checked_in_part_says_so(sandbox: Sandbox) -> None:
    assert await found(sandbox, "Half") == ([], ("data.train.source",))


async def test_a_job_that_asks_for_more_than_the_operator_gives_is_told_the_limit_and_both_numbers(
    sandbox: Sandbox,
) -> None:
    problems, _ = await found(sandbox, "Good", learner={"data_parallel_size": 4096})
    [(field, message)] = [problem for problem in problems if "MILLRACE_MAX_RANKS" in problem[1]]
    assert field == "learner.data_parallel_size"
    assert message.startswith("4096 ranks are more than MILLRACE_MAX_RANKS=")


async def test_what_a_job_would_begin_with_is_looked_at_before_it_is_taken_in(sandbox: Sandbox) -> None:
    begins: dict[str, Any] = {"checkpoint": {"load": "other"}}
    assert await found(sandbox, "Good", **begins) == ([], ())
    assert (await found(sandbox, "Misled", **begins))[0] == [
        ("checkpoint.load", "/jobs/other: was made of another model")
    ]
    assert await found(sandbox, "Unloaded", **begins) == ([], ("checkpoint.load",))


ROLES: dict[str, Any] = {
    "algorithm": {"preset": "ppo"},
    "critic": {"path": "a"},
    "reference": {"path": "b"},
}


async def test_the_models_of_roles_are_tried_as_the_actors_and_counted(sandbox: Sandbox) -> None:
    assert await found(sandbox, "Good", **ROLES) == ([], ())
    problems, _ = await found(sandbox, "Roles", **ROLES)
    assert problems[0] == ("reference.path", "there is no model 'b'")
    assert [field for field, _ in problems[1:]] == ["critic.path"]
    assert "1000000000000000 of the critic" in problems[1][1]


async def test_a_roles_model_that_is_not_read_in_time_is_left_to_the_learner(sandbox: Sandbox) -> None:
    assert await found(sandbox, "EndlessRole", deadline_s=2.0, **ROLES) == ([], ("critic.path", "reference.path"))


async def test_roles_that_begin_with_the_actors_weights_are_not_tried(sandbox: Sandbox) -> None:
    begins: dict[str, Any] = {"algorithm": {"preset": "ppo"}, "critic": {}, "reference": {}}
    assert await found(sandbox, "EndlessRole", **begins) == ([], ())


async def test_names_that_no_installed_package_offers_are_refused_with_those_that_exist(sandbox: Sandbox) -> None:
    problems, _ = await found(sandbox, "Good", algorithm={"loss": "dappo", "advantage_estimator": "grppo"})
    assert [field for field, _ in problems] == ["algorithm.advantage_estimator", "algorithm.loss"]
    assert "there is no advantage_estimator 'grppo'; there are grpo, dr_grpo" in problems[0][1]
    assert "there is no loss 'dappo'; there are dapo, gspo" in problems[1][1]


async def test_a_procedural_source_that_makes_no_first_task_is_refused(sandbox: Sandbox) -> None:
    train = {"source": "reasoning_gym:prime_factorization", "config": {"min_value": 2}}
    problems, _ = await found(sandbox, "Endless", deadline_s=2.0, data={"train": train})
    assert problems == [("data.train.config", "the first task was not made within 2 s")]


async def test_a_check_that_takes_its_process_down_is_the_fields_fault(sandbox: Sandbox) -> None:
    problems, _ = await found(sandbox, "Hungry")
    assert [field for field, _ in problems] == ["model.path", "data.train.source", "data.eval.source"]
    assert "needed more than" in problems[0][1]
    assert "SIGSEGV" in problems[1][1]


async def test_whatever_a_library_raises_over_a_jobs_files_is_told_and_is_no_500(sandbox: Sandbox) -> None:
    assert await found(sandbox, "Faulty") == ([("model.path", "cannot be checked: ZeroDivisionError")], ())


async def test_a_check_whose_process_is_killed_again_and_again_is_no_fault_of_the_job(sandbox: Sandbox) -> None:
    with pytest.raises(AdmissionBusy, match=r"model\.path cannot be checked now: it lost its process"):
        await found(sandbox, "Killed")


async def test_a_refusal_while_the_checks_begin_names_its_field(sandbox: Sandbox) -> None:
    problems, _ = await found(sandbox, "Unready")
    assert problems[0] == ("model.path", "is not to be looked at")


async def test_no_more_specs_are_checked_at_once_than_there_are_places(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_TIMEOUT_S", 0.3)
    admission = Admission(sandbox, Settings(), deadline_s=3.0, checks=f"{TRIALS}:EndlessModel")
    began = time.monotonic()
    answers = await asyncio.gather(
        *(admission.admit(SPEC) for _ in range(3 * MAX_CONCURRENT_CHECKS)), return_exceptions=True
    )
    assert sum(isinstance(answer, AdmissionBusy) for answer in answers) == 2 * MAX_CONCURRENT_CHECKS
    assert time.monotonic() - began < 6.0


async def test_nothing_is_left_of_a_submission_whose_client_went_away(sandbox: Sandbox) -> None:
    server = psutil.Process(sandbox.pid)
    admission = Admission(sandbox, Settings(), checks=f"{TRIALS}:EndlessModel")
    admitting = asyncio.create_task(admission.admit(SPEC))
    while len(family(server.pid)) != 2:
        await asyncio.sleep(0.02)
    admitting.cancel()
    await asyncio.gather(admitting, return_exceptions=True)
    until = time.monotonic() + 5.0
    while time.monotonic() < until and len(family(server.pid)) != 1:
        await asyncio.sleep(0.02)
    assert len(family(server.pid)) == 1


async def test_a_body_is_read_to_the_spec_that_it_says(sandbox: Sandbox) -> None:
    admission = Admission(sandbox, Settings())
    assert await admission.read(json.dumps(DOCUMENT).encode(), "application/json") == SPEC
    assert await admission.read(json.dumps(DOCUMENT).encode(), "application/yaml") == SPEC


async def test_what_is_wrong_with_a_body_is_told_by_field(sandbox: Sandbox) -> None:
    admission = Admission(sandbox, Settings())
    with pytest.raises(SpecRefused) as caught:
        await admission.read(b'{"model": {"path": "tiny"}, "lerner": {}}', "application/json")
    assert {problem.field for problem in caught.value.problems} == {"data", "lerner"}


async def test_a_body_that_cannot_be_parsed_within_its_limits_is_refused_and_others_are_read_meanwhile(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ", "tests.unit.common.sandbox.deeds:echo_slowly")
    monkeypatch.setattr(module, "READ_LIMITS", Limits(wall_s=1.0, memory_mib=256))
    admission = Admission(sandbox, Settings())
    with pytest.raises(SpecRefused, match="the body cannot be read: it took longer than 1 s"):
        await admission.read(b"", "application/yaml")
