from __future__ import annotations

import redis.asyncio
from playwright.async_api import expect

from services.common.jobs.store import JobStore
from services.common.models.prompts import PromptEncoder
from tests.integration.console.conftest import Console
from tests.integration.console.scene import keep_group, rollout, started

END = 1
"""The tokenizer's end of turn."""


async def test_a_group_is_shown_as_the_model_sees_it_and_as_it_was_before(
    console: Console, redis: redis.asyncio.Redis, store: JobStore, document: dict[str, object]
) -> None:
    job_id = await started(store, document)
    encoder = PromptEncoder(console.gateway.home / "models" / "tiny")
    rendered = encoder.render([("user", "2 + 3 =")], 1000)
    answer = [*encoder.encode_text("5"), END]
    await keep_group(
        redis, job_id, 7, [rollout("5", token_ids=answer, tokens=2)], prompt_token_ids=encoder.token_ids(rendered)
    )
    await console.sign_in(f"#/jobs/{job_id}/samples")
    card = console.page.get_by_role("article", name="Group 7")
    switch = card.get_by_role("button", name="Special tokens")
    await expect(switch).to_have_attribute("aria-pressed", "false")
    await switch.click()
    await expect(switch).to_have_attribute("aria-pressed", "true")
    texts = card.locator("dd.text, pre.text")
    assert (await texts.nth(0).text_content(), await texts.nth(2).text_content()) == (
        rendered,
        encoder.decode_raw([answer])[0],
    )
    await switch.click()
    await expect(texts.nth(0)).to_have_text("2 + 3 =")
    await expect(texts.nth(2)).to_have_text("5")


async def test_a_model_that_is_gone_is_told_and_the_texts_stay(
    console: Console, redis: redis.asyncio.Redis, store: JobStore, document: dict[str, object]
) -> None:
    console.expected.append("422")
    job_id = await started(store, {**document, "model": {"path": "gone"}})
    await keep_group(redis, job_id, 7, [rollout("5", token_ids=[5, END], tokens=2)], prompt_token_ids=[5])
    await console.sign_in(f"#/jobs/{job_id}/samples")
    card = console.page.get_by_role("article", name="Group 7")
    await card.get_by_role("button", name="Special tokens").click()
    await expect(
        card.get_by_role("button", name="raw texts cannot be made: model.path: there is no model 'gone'")
    ).to_be_visible()
    await expect(card.locator("pre.text")).to_have_text("5")
