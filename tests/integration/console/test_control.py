from __future__ import annotations

from typing import Any

import pytest_asyncio
from playwright.async_api import Page, expect

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec
from tests.integration.console.conftest import Console
from tests.integration.console.scene import make_step, started

MOST_TABS = 40


@pytest_asyncio.fixture(loop_scope="session")
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return await started(store, document)


async def test_cancelling_asks_first_and_then_asks_the_learner_to_stop(
    console: Console, store: JobStore, job_id: str
) -> None:
    page = console.page
    await console.sign_in(f"#/jobs/{job_id}")
    dialog = page.get_by_role("dialog")
    for way_out in ("Keep it running", "Escape"):
        await page.get_by_role("button", name="Cancel").click()
        await expect(dialog).to_contain_text(job_id)
        await expect(page.get_by_role("button", name="Keep it running")).to_be_focused()
        if way_out == "Escape":
            await page.keyboard.press("Escape")
        else:
            await page.get_by_role("button", name=way_out).click()
        await expect(dialog).to_be_hidden()
        assert not (await store.get(job_id)).cancel_requested
    await page.get_by_role("button", name="Cancel").click()
    await page.get_by_role("button", name="Cancel the job").click()
    await expect(page.locator("main").get_by_text("cancelling", exact=True)).to_be_visible()
    assert (await store.get(job_id)).cancel_requested
    await expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    await store.transition(job_id, JobState.CANCELLED, allowed=[JobState.RUNNING], cause="cancelled")
    await expect(page.locator("header").get_by_text("cancelled", exact=True).first).to_be_visible()


async def test_pausing_and_resuming_follow_the_learner(console: Console, store: JobStore, job_id: str) -> None:
    page = console.page
    await console.sign_in(f"#/jobs/{job_id}")
    state = page.locator(".job-head .badge")
    await page.get_by_role("button", name="Pause").click()
    await expect(state).to_have_text("pausing")
    assert (await store.get(job_id)).pause_requested
    await store.transition(job_id, JobState.PAUSED, allowed=[JobState.RUNNING])
    await expect(state).to_have_text("paused")
    await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("button", name="Pause")).to_be_focused()
    assert not (await store.get(job_id)).pause_requested
    await store.transition(job_id, JobState.RUNNING, allowed=[JobState.PAUSED, JobState.QUEUED])
    await expect(state).to_have_text("running")


async def test_deleting_an_ended_job_asks_first_and_then_shows_the_other_jobs(
    console: Console, store: JobStore, job_id: str, document: dict[str, Any]
) -> None:
    page, other = console.page, await store.create(JobSpec.model_validate(document))
    await console.sign_in(f"#/jobs/{job_id}")
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    await expect(page.get_by_role("button", name="Delete")).to_have_count(0)
    await store.transition(job_id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await page.get_by_role("button", name="Delete").click()
    await expect(page.get_by_role("dialog")).to_contain_text(job_id)
    await page.get_by_role("button", name="Keep it").click()
    assert await store.find(job_id) is not None
    await page.get_by_role("button", name="Delete").click()
    await page.get_by_role("button", name="Delete the job").click()
    await expect(page.get_by_text(other.id)).to_be_visible()
    await expect(page.locator("main").get_by_text(job_id)).to_have_count(0)
    assert await store.find(job_id) is None


async def test_a_queued_job_is_cancelled_at_once(console: Console, store: JobStore, document: dict[str, Any]) -> None:
    job = await store.create(JobSpec.model_validate(document))
    await console.sign_in(f"#/jobs/{job.id}")
    await console.page.get_by_role("button", name="Cancel").click()
    await console.page.get_by_role("button", name="Cancel the job").click()
    await expect(console.page.locator(".job-head .badge")).to_have_text("cancelled")
    await expect(console.page.get_by_text("cancelled while queued")).to_be_visible()


async def test_an_action_that_comes_too_late_says_why(console: Console, store: JobStore, job_id: str) -> None:
    console.expected.append("409 (Conflict)")
    page = console.page
    await console.sign_in(f"#/jobs/{job_id}")
    await page.get_by_role("button", name="Cancel").click()
    await store.transition(job_id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await page.get_by_role("button", name="Cancel the job").click()
    await expect(page.get_by_role("alert").filter(has_text="Not done")).to_contain_text("succeeded")


async def tab_to(page: Page, name: str) -> None:
    """Presses Tab until the element of this name has the focus; fails when it cannot be seen there."""
    for _ in range(MOST_TABS):
        await page.keyboard.press("Tab")
        told, outline = await page.evaluate(
            "(() => { const e = document.activeElement; const outline = (box) => getComputedStyle(box).outlineStyle; "
            "return [e.labels?.[0]?.textContent ?? e.textContent, outline(e) + outline(e.closest('.editor') ?? e)] })()"
        )
        assert "solid" in outline, f"the focus cannot be seen on {told!r}"
        if told.strip() == name:
            return
    raise AssertionError(f"{MOST_TABS} tabs do not reach {name!r}")


async def test_everything_can_be_done_by_keyboard_alone(console: Console, store: JobStore) -> None:
    page = console.page
    await console.open()
    await page.keyboard.type(console.gateway.token)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Jobs", level=1)).to_be_focused()
    await tab_to(page, "Submit a job")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Submit a job")).to_be_focused()
    await expect(page.get_by_label("name", exact=True)).to_have_value("demo")
    await tab_to(page, "name")
    await page.keyboard.press("Control+A")
    await page.keyboard.type("by-keyboard")
    await tab_to(page, "Submit the job")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_contain_text("by-keyboard-")
    await expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    await tab_to(page, "Cancel")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await tab_to(page, "Cancel the job")
    await page.keyboard.press("Enter")
    await expect(page.locator(".job-head .badge")).to_have_text("cancelled")
    await tab_to(page, "Samples")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("No group has been judged yet.")).to_be_visible()
    assert [job.state for job in await store.list()] == [JobState.CANCELLED]


async def test_the_skip_link_leads_past_the_navigation(console: Console, store: JobStore, job_id: str) -> None:
    page = console.page
    await make_step(store, job_id, 1)
    await console.sign_in(f"#/jobs/{job_id}")
    await page.reload()
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    assert page.url.endswith(f"#/jobs/{job_id}")
