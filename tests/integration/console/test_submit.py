from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import APIResponse, Route, expect

from services.common.jobs.store import JobStore
from services.common.spec.choices import Preset
from services.common.spec.job import JobSpec, parse_spec
from tests.integration.console.conftest import Console

BASE = {"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}
UNPROCESSABLE = "422 (Unprocessable"


@pytest.fixture
def line_of() -> Any:
    """The number of the line that holds a text."""
    return lambda text, part: next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


async def test_what_the_api_refuses_is_shown_at_field_and_line_and_what_it_takes_is_queued(
    console: Console, store: JobStore, line_of: Any
) -> None:
    console.expected.append(UNPROCESSABLE)
    page = console.page
    await console.sign_in("#/submit")
    await page.get_by_label("learner.lr", exact=True).fill("-1")
    await page.get_by_label("rollout.group_size").fill("eight")
    await page.get_by_label("name", exact=True).fill("from-console")
    editor = page.get_by_role("textbox", name="The whole spec")
    text = await editor.input_value()
    assert json.loads(text)["learner"]["lr"] == -1
    await page.get_by_role("button", name="Submit the job").click()

    rate = page.get_by_label("learner.lr", exact=True)
    await expect(rate).to_have_attribute("aria-invalid", "true")
    await expect(page.locator("#field-learner-lr-problem")).to_contain_text("Input should be greater than 0")
    await expect(page.locator("#field-rollout-group_size-problem")).to_contain_text("Input should be a valid integer")
    wrong = await page.locator(".gutter .wrong").all_text_contents()
    assert wrong == [str(line_of(text, part)) for part in ('"group_size"', '"lr"')]
    await expect(page.get_by_label("learner.steps")).to_have_attribute("aria-invalid", "false")
    problems = page.get_by_role("alert").filter(has_text="not taken in")
    await problems.get_by_role("button", name="learner.lr").click()
    await expect(rate).to_be_focused()
    assert await store.list() == []

    await rate.fill("0.001")
    await page.get_by_label("rollout.group_size").fill("4")
    await page.get_by_role("button", name="Submit the job").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"from-console-[0-9a-f]{8}"))
    [row] = await store.list()
    job = await store.get(row.id)
    assert (job.spec.learner.lr, job.spec.rollout.group_size, job.spec.data.train.size) == (0.001, 4, 8000)


async def test_a_preset_is_chosen_from_a_list_and_what_it_needs_is_said_at_its_line(
    console: Console, store: JobStore
) -> None:
    console.expected.append(UNPROCESSABLE)
    page = console.page
    await console.sign_in("#/submit")
    preset, loss = page.get_by_label("algorithm.preset"), page.get_by_label("algorithm.loss")
    await expect(preset.locator("option")).to_have_text(["none (default)", *Preset])
    await expect(loss.locator("option")).to_have_text(["dapo (default)", "gspo", "cispo", "surrogate"])
    await preset.select_option("grpo")
    editor = page.get_by_role("textbox", name="The whole spec")
    document = json.loads(await editor.input_value())
    assert document["algorithm"]["preset"] == "grpo"
    await page.get_by_role("button", name="Submit the job").click()
    problems = page.get_by_role("alert").filter(has_text="not taken in")
    await expect(problems).to_contain_text("algorithm.kl_coefficient 0.04 needs a reference")
    await editor.fill(json.dumps(document | {"reference": {}}))
    await page.get_by_role("button", name="Submit the job").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"-[0-9a-f]{8}"))
    [row] = await store.list()
    assert (await store.get(row.id)).spec.algorithm.preset == "grpo"


async def test_the_name_of_an_installed_loss_is_kept_by_the_form(console: Console) -> None:
    page = console.page
    await console.sign_in("#/submit")
    editor = page.get_by_role("textbox", name="The whole spec")
    document = json.loads(await editor.input_value())
    document["algorithm"]["loss"] = "my_loss"
    await editor.fill(json.dumps(document))
    await expect(page.get_by_label("algorithm.loss")).to_have_value("my_loss")
    await page.get_by_label("learner.steps").fill("7")
    assert json.loads(await editor.input_value())["algorithm"]["loss"] == "my_loss"


async def test_an_unknown_key_a_missing_section_and_text_that_is_no_yaml_are_named_by_line(console: Console) -> None:
    console.expected.append(UNPROCESSABLE)
    page = console.page
    await console.sign_in("#/submit")
    editor = page.get_by_role("textbox", name="The whole spec")
    submit = page.get_by_role("button", name="Submit the job")
    problems = page.get_by_role("alert").filter(has_text="not taken in")
    await editor.fill("name: yaml-job\nmodel: {path: tiny}\nlearner:\n  # a comment\n  lrr: 1\n")
    await expect(page.get_by_label("learner.lr", exact=True)).to_be_disabled()
    await submit.click()
    await expect(problems).to_contain_text("learner.lrr is not a setting; did you mean lr?")
    await expect(problems).to_contain_text("data Field required")
    assert await page.locator(".gutter .wrong").all_text_contents() == ["5"]
    await problems.get_by_role("button", name="line 5").click()
    assert await editor.evaluate("e => e.value.slice(e.selectionStart, e.selectionEnd)") == "  lrr: 1"
    await editor.fill("name: a\nmodel: [\n")
    await submit.click()
    await expect(problems).to_contain_text("not valid YAML")
    await expect(page.locator(".gutter .wrong")).to_have_count(1)


async def test_a_yaml_file_is_opened_and_taken_in(console: Console, store: JobStore) -> None:
    page = console.page
    await console.sign_in("#/submit")
    demo = Path(__file__).parents[3] / "deploy" / "config" / "jobs" / "demo.yaml"
    await page.get_by_label("Open a file").set_input_files(demo)
    await expect(page.get_by_role("textbox", name="The whole spec")).to_have_value(demo.read_text())
    await page.get_by_role("button", name="Submit the job").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"demo-[0-9a-f]{8}"))
    assert [(await store.get(row.id)).spec for row in await store.list()] == [parse_spec(demo.read_text())]


async def test_a_form_sent_again_after_a_lost_answer_makes_one_job(console: Console, store: JobStore) -> None:
    console.expected.append("ERR_FAILED")
    page = console.page
    await console.sign_in("#/submit")
    lost: list[APIResponse] = []

    async def lose_the_first_answer(route: Route) -> None:
        if lost:
            await route.continue_()
            return
        lost.append(await route.fetch())
        await route.abort()

    await page.route("**/jobs", lose_the_first_answer)
    submit = page.get_by_role("button", name="Submit the job")
    await submit.click()
    await expect(page.get_by_role("alert").filter(has_text="can be sent again")).to_be_visible()
    await submit.click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"demo-"))
    assert lost[0].status == 201
    assert len(await store.list()) == 1


async def test_a_job_like_another_begins_with_its_spec(
    console: Console, store: JobStore, document: dict[str, Any]
) -> None:
    job = await store.create(JobSpec.model_validate(document))
    await console.sign_in(f"#/jobs/{job.id}/spec")
    await console.page.get_by_role("link", name="Submit a job like this").click()
    await expect(console.page.get_by_label("learner.steps")).to_have_value("20")
    text = await console.page.get_by_role("textbox", name="The whole spec").input_value()
    assert JobSpec.model_validate(json.loads(text)) == job.spec


async def test_the_form_offers_what_the_installation_has_and_every_setting_there_is(
    console: Console, store: JobStore
) -> None:
    page = console.page
    await console.sign_in("#/submit")
    await expect(page.locator("#offered-models option[value=tiny]")).to_have_count(1)
    await expect(page.get_by_label("model.path", exact=True)).to_have_attribute("list", "offered-models")
    await page.get_by_label("reward.verifiers.*").fill("exact_match")
    await page.get_by_text("All settings").click()
    await page.get_by_role("searchbox", name="Search").fill("overlong prompts")
    await page.get_by_label("data.filter_overlong_prompts").check()
    await page.get_by_role("searchbox", name="Search").fill("adam_beta2")
    await page.get_by_label("learner.adam_beta2").fill("0.98")
    await page.get_by_label("name", exact=True).fill("all-settings")
    await page.get_by_role("button", name="Submit the job").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"all-settings-[0-9a-f]{8}"))
    [row] = await store.list()
    spec = (await store.get(row.id)).spec
    assert (spec.reward.verifiers, spec.data.filter_overlong_prompts, spec.learner.adam_beta2) == (
        {"*": "exact_match"},
        True,
        0.98,
    )


async def test_every_leaf_of_the_specs_schema_has_one_field(console: Console) -> None:
    page = console.page
    await console.sign_in("#/submit")
    await expect(page.get_by_text("All settings")).to_be_visible()
    found = await page.locator("[data-path]").evaluate_all("fields => fields.map((field) => field.dataset.path)")
    spec = json.loads(JobSpec.model_validate(BASE).model_dump_json())
    paths = [
        f"{section}.{name}"
        for section, values in spec.items()
        if isinstance(values, dict)
        for name in values
        if not isinstance(values[name], dict)
    ]
    assert len(found) == len(set(found))
    optional = {"data.eval", "model.lora"}  # null in this spec: the form has the settings of each
    assert not set(paths) - set(found) - optional
    assert all(any(path.startswith(f"{section}.") for path in found) for section in optional)
