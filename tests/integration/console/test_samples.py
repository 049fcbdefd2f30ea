from __future__ import annotations

import redis.asyncio
from playwright.async_api import expect

from services.common.jobs.store import JobStore
from services.common.models.prompts import PromptEncoder
from tests.integration.console.conftest import Console
from tests.integration.console.scene import keep_group, rollout, started, turn

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


async def test_an_episode_is_a_transcript_that_says_who_speaks_and_a_long_one_is_folded_in_the_middle(
    console: Console, redis: redis.asyncio.Redis, store: JobStore, document: dict[str, object]
) -> None:
    job_id = await started(store, document)
    short = [turn(1, "37*84?", "calc:37*84", finish_reason="length", reward=0.5), turn(2, "3108", "it is 3108")]
    long = [turn(number, f"asked {number}", f"reply {number}") for number in range(1, 10)]
    rollouts = [
        rollout("all", reward=1.0, accuracy=1.0, detail="3108 is right", turns=short),
        rollout("all", finish_reason="turns", turns=long),
    ]
    played = {"prompt": "37*84?", "ground_truth": "", "environment": "calculator", "environment_seed": 17}
    await keep_group(redis, job_id, 7, rollouts, **played)
    await console.sign_in(f"#/jobs/{job_id}/samples")
    card = console.page.get_by_role("article", name="Group 7")
    await expect(card).to_contain_text("seed 17 of calculator")
    await expect(card.get_by_text("Reference")).to_have_count(0)
    first, second = card.locator(".rollout").nth(0), card.locator(".rollout").nth(1)
    assert " ".join((await first.inner_text()).split()).startswith(
        "right reward 1 Turn 1 · reward 0.500 · cut off · 3 tokens Policy calc:37*84 "
        "Turn 2 · 3 tokens Environment (tool) 3108 Policy it is 3108 accuracy 1"
    )
    await expect(first).to_contain_text("reasoning_gym: 3108 is right")
    await expect(second).to_contain_text("no turn left")
    await expect(second.get_by_text("reply 3", exact=True)).to_be_visible()
    await expect(second.get_by_text("reply 4", exact=True)).to_be_hidden()
    await second.get_by_text("3 turns between").click()
    await expect(second.get_by_text("asked 4", exact=True)).to_be_visible()


async def test_the_transcript_comes_back_after_the_special_tokens(
    console: Console, redis: redis.asyncio.Redis, store: JobStore, document: dict[str, object]
) -> None:
    job_id = await started(store, document)
    answer = [*PromptEncoder(console.gateway.home / "models" / "tiny").encode_text("5"), END]
    episode = rollout("5", token_ids=answer, tokens=2, turns=[turn(1, "2 + 3 =", "5"), turn(2, "sure?", "yes")])
    await keep_group(redis, job_id, 7, [episode], prompt_token_ids=[5])
    await console.sign_in(f"#/jobs/{job_id}/samples")
    card = console.page.get_by_role("article", name="Group 7")
    switch = card.get_by_role("button", name="Special tokens")
    await switch.click()
    await expect(switch).to_have_attribute("aria-pressed", "true")
    await expect(card.get_by_text("Turn 2")).to_have_count(0)
    await expect(card.locator(".rollout pre")).to_have_count(1)
    await switch.click()
    await expect(card.get_by_text("Turn 2")).to_be_visible()
    await expect(card.get_by_text("sure?")).to_be_visible()
