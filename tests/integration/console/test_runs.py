"""Many runs in the browser: found, ordered, labelled, compared, and talked to."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from playwright.async_api import Route, expect

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec
from tests.integration.console.conftest import Console
from tests.integration.console.scene import make_eval, make_step, started


async def run_of(
    store: JobStore, document: dict[str, Any], name: str, *, reward: float, steps: int, **sections: Any
) -> str:
    """A job that trained for some steps and has ended."""
    job_id = await started(store, {**document, "name": name, **sections})
    for step in range(1, steps + 1):
        await make_step(store, job_id, step, reward=reward * step / steps, trained_tokens=100.0)
    await make_eval(store, job_id, steps, reward)
    await store.update(job_id, reward=reward, best_score=reward, best_score_se=0.021)
    await store.transition(job_id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    return job_id


@pytest_asyncio.fixture(loop_scope="session")
async def runs(store: JobStore, document: dict[str, Any]) -> list[str]:
    first = await run_of(store, document, "base", reward=0.25, steps=5, tags=["lr"])
    second = await run_of(
        store, document, "higher", reward=0.75, steps=5, learner={"steps": 20, "lr": 3e-5}, tags=["lr"]
    )
    third = await run_of(store, document, "longer", reward=0.5, steps=9, notes="once more", learner={"steps": 30})
    return [first, second, third]


def names(console: Console) -> Any:
    return console.page.get_by_role("table", name="Jobs").locator("tbody th a")


async def test_runs_show_how_good_they_are_and_in_which_settings_they_differ(console: Console, runs: list[str]) -> None:
    await console.sign_in()
    row = console.page.get_by_role("row").filter(has_text=runs[1])
    await expect(row).to_contain_text("0.750 ± 0.021")
    await expect(row).to_contain_text("reasoning_gym:chain_sum")
    await expect(row.get_by_text("lr 0.00003")).to_be_visible()
    await expect(row.get_by_text("steps 20")).to_be_visible()


@pytest.mark.usefixtures("runs")
async def test_runs_are_ordered_searched_and_filtered_and_the_address_keeps_it(console: Console) -> None:
    page = console.page
    await console.sign_in()
    await expect(names(console)).to_have_text(["longer", "higher", "base"])
    await page.get_by_role("button", name="Held-out").click()
    await expect(names(console)).to_have_text(["higher", "longer", "base"])
    await expect(page.get_by_role("columnheader", name="Held-out")).to_have_attribute("aria-sort", "descending")
    await page.get_by_role("button", name="Held-out").click()
    await expect(names(console)).to_have_text(["base", "longer", "higher"])
    await page.reload()
    await expect(names(console)).to_have_text(["base", "longer", "higher"])
    await page.get_by_role("searchbox", name="Search").fill("ONCE more")
    await expect(names(console)).to_have_text(["longer"])
    await page.get_by_role("searchbox", name="Search").fill("")
    await page.get_by_role("button", name="Jobs with the tag lr").first.click()
    await expect(names(console)).to_have_text(["base", "higher"])
    await page.get_by_role("button", name="Show jobs without the tag lr, too").click()
    await page.locator("#state").select_option("failed")
    await expect(page.get_by_text("No job is like that.")).to_be_visible()


async def test_runs_that_are_picked_by_keyboard_are_compared_along_steps_time_and_tokens(
    console: Console, runs: list[str]
) -> None:
    page = console.page
    await console.sign_in()
    for job_id in runs[:2]:
        await page.get_by_role("checkbox", name=f"Compare {job_id}").focus()
        await page.keyboard.press("Space")
    await page.wait_for_timeout(2500)  # the table is drawn anew meanwhile
    await expect(page.get_by_role("checkbox", name=f"Compare {runs[0]}")).to_be_checked()
    await page.get_by_role("link", name="Compare 2 runs").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Compare runs")
    settings = page.get_by_role("table", name="Settings that differ")
    await expect(settings.get_by_role("row").filter(has_text="learner.lr")).to_contain_text("0.00003")
    chart = page.get_by_role("img", name="reward")
    await expect(chart).to_have_attribute("aria-label", re.compile(rf"at step 5: {runs[0]} 0.250, {runs[1]} 0.750"))
    await expect(chart.locator("polyline.curve")).to_have_count(2)
    await page.locator("#axis").select_option("tokens")
    await expect(chart).to_have_attribute("aria-label", re.compile("at trained tokens 500"))
    await page.locator("#axis").select_option("time")
    await expect(chart).to_have_attribute("aria-label", re.compile("at seconds of run time"))
    await page.locator("#figure").select_option("avg_at_k")
    await expect(page.get_by_role("img", name="avg at k")).to_be_visible()


async def test_tags_and_notes_are_changed_where_the_job_is_shown(
    console: Console, store: JobStore, runs: list[str]
) -> None:
    page = console.page
    await console.sign_in(f"#/jobs/{runs[0]}")
    await page.get_by_role("button", name="Edit tags and notes").click()
    await page.get_by_label("Tags, with commas between them").fill("baseline, paper")
    await page.get_by_label("Notes").fill("the one to beat")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("link", name="baseline")).to_be_visible()
    record = await store.get(runs[0])
    assert (record.tags, record.notes) == (["baseline", "paper"], "the one to beat")


async def test_a_thousand_ended_jobs_are_shown_by_pages_within_a_second(
    console: Console, redis: redis.asyncio.Redis, store: JobStore, document: dict[str, Any]
) -> None:
    first = (await store.create(JobSpec.model_validate(document))).id
    await store.transition(first, JobState.SUCCEEDED, allowed=[JobState.QUEUED])
    record: Any = await redis.hgetall(keys.record(first))
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(1000):
            job_id = f"demo-{number:08x}"
            pipe.hset(keys.record(job_id), mapping=record | {"order": number + 2, "reward": number / 1000})
            pipe.zadd(keys.JOBS, {job_id: number + 2})
        await pipe.execute()
    page = console.page
    await console.sign_in()
    await expect(page.get_by_text("1,001 jobs")).to_be_visible()
    began = time.monotonic()
    await page.get_by_role("button", name="Reward").click()
    await expect(page.locator("tbody tr").first).to_contain_text("0.999")
    assert time.monotonic() - began < 1.0
    await expect(page.locator("tbody tr")).to_have_count(50)
    await page.get_by_role("button", name="Next page").click()
    await expect(page.locator("tbody tr").first).to_contain_text("0.949")


async def test_an_answer_is_shown_as_it_is_sampled_and_a_conversation_goes_on(
    console: Console, store: JobStore, document: dict[str, Any]
) -> None:
    job_id = await started(store, document)
    asked: list[dict[str, Any]] = []

    async def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in ("fi", "ve")]
        body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
        await route.fulfill(status=200, content_type="text/event-stream", body=body)

    page = console.page
    await page.route("**/v1/chat/completions", answer)
    await console.sign_in(f"#/chat/{job_id}")
    await expect(page.get_by_label("Policy")).to_have_value(job_id)
    for number in (1, 2):
        await page.get_by_label("Message").fill("2 + 3 =")
        await page.keyboard.press("Enter")
        await expect(page.locator(".talk .assistant")).to_have_count(number)
        await expect(page.locator(".talk .assistant .text").last).to_have_text("five")
    assert (asked[1]["model"], asked[1]["stream"]) == (job_id, True)
    assert [turn["content"] for turn in asked[1]["messages"]] == ["2 + 3 =", "five", "2 + 3 ="]
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator(".talk li")).to_have_count(0)


async def test_a_policy_that_no_server_samples_with_is_an_error_in_words(
    console: Console, store: JobStore, document: dict[str, Any]
) -> None:
    console.expected.append("50")
    job_id = await started(store, document)
    page = console.page
    await console.sign_in(f"#/chat/{job_id}")
    await page.get_by_label("Message").fill("2 + 3 =")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("alert").filter(has_text="No answer: ")).to_be_visible()
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
