"""The API's description: its own scripts, under the console's policy, and every operation on it."""

from __future__ import annotations

import httpx
from playwright.async_api import expect

from tests.integration.console.conftest import Console


async def test_the_description_shows_every_operation_and_schema_and_asks_no_other_host(console: Console) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        document = (await client.get(f"{console.gateway.url}/openapi.json")).json()
    page = console.page
    answer = await page.goto(f"{console.gateway.url}/docs")
    assert answer is not None
    assert "unsafe" not in answer.headers["content-security-policy"]
    await expect(page.get_by_role("heading", level=1)).to_contain_text("Millrace gateway")
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    await expect(page.locator("details:not([id^=schema-])")).to_have_count(len(operations))
    await expect(page.locator("details[id^=schema-]")).to_have_count(len(document["components"]["schemas"]))
    for operation in operations:
        assert await page.locator(f"#{operation['operationId']} table").count() >= 1


async def test_an_operation_opens_and_leads_to_its_schema(console: Console) -> None:
    page = console.page
    await page.goto(f"{console.gateway.url}/docs#list_jobs")
    operation = page.locator("#list_jobs")
    await expect(operation.get_by_role("rowheader", name="limit")).to_be_visible()
    await operation.get_by_role("link", name="JobList").click()
    await expect(page.locator("#schema-JobList").get_by_role("rowheader", name="total")).to_be_visible()
