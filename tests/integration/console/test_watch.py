from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from playwright.async_api import expect

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from tests.integration.console.conftest import Console
from tests.integration.console.scene import (
    HOSTILE,
    crowded,
    keep_group,
    make_eval,
    make_step,
    rollout,
    staffed,
    started,
)


@pytest_asyncio.fixture(loop_scope="session")
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return await started(store, document)


async def test_steps_and_evaluations_arrive_live_beside_the_history(
    console: Console, store: JobStore, job_id: str
) -> None:
    page = console.page
    for step in range(1, 4):
        await make_step(store, job_id, step, reward=0.1 * step)
    await console.sign_in(f"#/jobs/{job_id}")
    rows = page.get_by_role("table", name="The newest 12 steps").locator("tbody tr")
    await expect(rows).to_have_count(3)
    reward = page.get_by_role("img", name="Reward and accuracy")
    await expect(reward).to_have_attribute("aria-label", "Reward and accuracy, at step 3: reward 0.300, accuracy 0.500")
    for step in range(4, 20):
        await make_step(store, job_id, step, reward=0.05 * step, mismatch_kl_k3=0.123)
    await make_eval(store, job_id, 19, 0.75)
    await expect(reward).to_have_attribute(
        "aria-label", "Reward and accuracy, at step 19: reward 0.950, accuracy 0.500"
    )
    await expect(page.get_by_role("img", name="Mismatch KL")).to_have_attribute(
        "aria-label", "Mismatch KL, at step 19: k3 0.123"
    )
    await expect(page.get_by_role("img", name="Held-out evaluation")).to_have_attribute(
        "aria-label", "Held-out evaluation, at step 19: avg@8 0.750, pass@8 0.900"
    )
    await expect(rows).to_have_count(12)
    await expect(page.get_by_text("step 19 of 20")).to_be_visible()
    await expect(page.get_by_role("definition").filter(has_text="1,216")).to_be_visible()
    points = await reward.locator(".s1 polyline").last.get_attribute("points")
    assert points is not None
    assert len(points.split()) == 19
    await store.transition(job_id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await expect(page.get_by_role("status").filter(has_text="demo is succeeded")).to_be_attached()
    await expect(page.get_by_role("button", name="Pause")).to_have_count(0)


async def test_a_step_that_is_told_twice_counts_once_and_a_figure_that_is_none_is_left_out(
    console: Console, store: JobStore, job_id: str
) -> None:
    await make_step(store, job_id, 1)
    await console.sign_in(f"#/jobs/{job_id}")
    for step in (1, 2, 2, 3):
        await make_step(store, job_id, step, reward=None if step == 3 else 0.25)  # type: ignore[arg-type]
    rows = console.page.get_by_role("table", name="The newest 12 steps").locator("tbody tr")
    await expect(rows).to_have_count(3)
    await expect(rows.first).to_contain_text("–")
    await expect(console.page.get_by_role("img", name="Reward and accuracy")).to_have_attribute(
        "aria-label", "Reward and accuracy, at step 3: reward 0.250, accuracy 0.500"
    )


async def test_charts_of_roles_are_there_only_for_jobs_that_have_them(
    console: Console, store: JobStore, job_id: str
) -> None:
    page = console.page
    await make_step(store, job_id, 1)
    await console.sign_in(f"#/jobs/{job_id}")
    await expect(page.get_by_role("img", name="Entropy")).to_be_visible()
    for title in ("Value loss", "Explained variance", "Reference KL", "Clipped tokens", "Masked tokens"):
        await expect(page.get_by_role("img", name=title)).to_have_count(0)
        await expect(page.get_by_role("heading", name=title)).to_be_hidden()
    await make_step(store, job_id, 2, value_loss=0.5, explained_variance=-0.25)
    await make_step(
        store,
        job_id,
        3,
        value_loss=0.25,
        explained_variance=0.5,
        reference_kl=0.02,
        kl_coefficient=0.04,
        turns_mean=2.5,
    )
    for told in (
        "Value loss, at step 3: value loss 0.250",
        "Explained variance, at step 3: explained variance 0.500",
        "Turns, at step 3: mean 2.50",
        "Reference KL, at step 3: KL 0.02, coefficient 0.04",
    ):
        await expect(page.get_by_role("img", name=told, exact=True)).to_be_visible()
    points = await page.get_by_role("img", name="Explained variance").locator("polyline").last.get_attribute("points")
    assert points is not None
    assert len(points.split()) == 2, "drawn at its full width once it is shown"
    await expect(page.get_by_role("img", name="Masked tokens")).to_have_count(0)


async def test_the_slider_shows_every_chart_at_one_step(console: Console, store: JobStore, job_id: str) -> None:
    page = console.page
    for step in range(1, 11):
        await make_step(store, job_id, step, loss=float(step), grad_norm=10.0 * step)
    await console.sign_in(f"#/jobs/{job_id}")
    slider = page.get_by_role("slider", name="Figures at step")
    await expect(slider).to_have_value("10")
    for _ in range(3):
        await slider.press("ArrowLeft")
    await expect(page.get_by_role("img", name="Loss")).to_have_attribute("aria-label", "Loss, at step 7: loss 7")
    await expect(page.get_by_role("img", name="Gradient norm")).to_have_attribute(
        "aria-label", "Gradient norm, at step 7: before clipping 70"
    )
    await page.get_by_role("button", name="Back to newest").click()
    await expect(page.get_by_role("img", name="Loss")).to_have_attribute("aria-label", "Loss, at step 10: loss 10")


async def test_samples_stand_side_by_side_and_newer_ones_are_offered(
    console: Console, redis: redis.asyncio.Redis, job_id: str
) -> None:
    page = console.page
    verdicts = [
        rollout("5", reward=1.0, accuracy=1.0), rollout("6", reward=-0.5), rollout("4", reward=0.5, accuracy=0.5, finish_reason="length"),
        rollout("?", status="timeout", reward=None, accuracy=None),
        rollout("!", status="failed", reward=None, accuracy=None, max_policy_version=3),
    ]  # fmt: skip
    await keep_group(redis, job_id, 1, verdicts)
    await console.sign_in(f"#/jobs/{job_id}/samples")
    group = page.get_by_role("article", name="Group 1")
    await expect(group).to_contain_text("1 of 5 right")
    cards = group.get_by_role("listitem")
    told = [" ".join((await card.inner_text()).split()) for card in await cards.all()]
    assert [text.split(" accuracy")[0] for text in told] == [
        "right reward 1 5", "wrong reward -0.500 6", "partly right reward 0.500 4", "timeout no reward ?", "not judged no reward !",
    ]  # fmt: skip
    assert "cut off" in told[2]
    assert "v1–3" in told[4]
    boxes = [await card.bounding_box() for card in await cards.all()]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]

    await keep_group(redis, job_id, 2, [rollout("7"), rollout("8")], purpose="eval")
    await page.get_by_role("button", name="Show newer groups").click()
    await expect(page.get_by_role("article")).to_have_count(2)
    await page.get_by_label("Purpose").select_option("evaluation")
    await expect(page.get_by_role("article")).to_have_count(1)
    await page.get_by_label("Outcome").select_option("all right")
    await expect(page.get_by_role("article")).to_have_count(0)
    await expect(page.get_by_text("0 of the newest 2 groups")).to_be_visible()


async def test_workers_are_shown_with_their_versions(console: Console, redis: redis.asyncio.Redis, job_id: str) -> None:
    await staffed(redis, job_id)
    await console.sign_in("#/workers")
    row = console.page.get_by_role("row", name="rollout-0")
    await expect(row).to_contain_text("v2 1 behind")
    await expect(row.get_by_role("link", name=job_id)).to_be_visible()
    await expect(console.page.get_by_role("row", name="learner-0")).to_contain_text("v3")
    await row.get_by_role("link").focus()
    async with console.page.expect_response("**/workers"):
        pass
    await console.page.wait_for_timeout(200)
    await expect(row.get_by_role("link")).to_be_focused()
    await expect(console.page.get_by_text("1 learner, 1 rollout, 1 environment, 1 reward")).to_be_visible()


@pytest.mark.parametrize("view", ["#/jobs", "#/workers", "#/jobs/{id}", "#/jobs/{id}/samples", "#/jobs/{id}/events"])
async def test_hostile_text_stays_text(
    console: Console, store: JobStore, redis: redis.asyncio.Redis, document: dict[str, Any], view: str
) -> None:
    job_id = await crowded(store, redis, document)
    await console.sign_in(view.replace("{id}", job_id))
    await expect(console.page.locator("main").get_by_text("<img src=x onerror", exact=False).first).to_be_attached()
    await console.page.wait_for_timeout(500)
    assert await console.page.evaluate(
        "[window.pwned ?? null, document.querySelectorAll('main img, main script').length]"
    ) == [None, 0]


@pytest.mark.parametrize(
    "address",
    [
        "#/jobs/%3Cimg src=x onerror=window.pwned=1%3E",
        "#/jobs/..%2f..%2fworkers",
        "#/jobs/%E0%A4%A",
        "#/jobs/__proto__",
        "#/submit/x",
    ],
)
async def test_an_address_that_names_no_job_says_so(console: Console, address: str) -> None:
    console.expected.append("404 (Not Found)")
    await console.sign_in(address)
    await expect(console.page.get_by_text("no such job")).to_be_visible()
    assert await console.page.evaluate("window.pwned ?? null") is None


async def test_the_browser_itself_refuses_markup_and_inline_code(console: Console) -> None:
    console.expected += ["Content Security Policy", "TrustedHTML"]
    await console.sign_in()
    refused = await console.page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch (e) { return e.name } })()"
    )
    assert refused == "TypeError"
    await console.page.evaluate(
        "(() => { const s = document.createElement('style'); s.textContent = 'body { opacity: 0 }'; document.head.append(s) })()"
    )
    assert await console.page.evaluate("getComputedStyle(document.body).opacity") == "1"


async def test_the_job_list_follows_the_jobs(console: Console, store: JobStore, job_id: str) -> None:
    page = console.page
    await console.sign_in()
    row = page.get_by_role("row", name="demo")
    await expect(row).to_contain_text("running")
    await make_step(store, job_id, 5)
    await expect(row).to_contain_text("5 / 20")
    await expect(row.get_by_role("progressbar")).to_have_js_property("value", 5)
    await store.transition(job_id, JobState.FAILED, allowed=[JobState.RUNNING], cause=f"broke over {HOSTILE[:20]}")
    await expect(row).to_contain_text("failed")
    await expect(row).to_contain_text("broke over <img")
    assert json.dumps(await page.evaluate("window.pwned ?? null")) == "null"


async def test_why_groups_fail_is_shown_live_before_the_first_step(
    console: Console, store: JobStore, job_id: str
) -> None:
    page = console.page
    await console.sign_in(f"#/jobs/{job_id}")
    await expect(page.get_by_role("heading", name="Groups by fate")).to_be_visible()
    reason = f"8 of 8 checks failed: ValueError: {HOSTILE}"
    await store.update_in_redis(
        job_id,
        groups=json.dumps({"issued": 20, "active": 3, "failed": 17}),
        failure=reason,
        failed_reasons=json.dumps({reason: 17}),
    )
    reasons = page.get_by_role("list", name="Why groups failed").get_by_role("listitem")
    await expect(reasons).to_have_text([f"17 × {reason}"])
    await expect(page.get_by_role("definition").filter(has_text=reason)).to_be_visible()
