from __future__ import annotations

from playwright.async_api import expect

from tests.integration.console.conftest import Console

REFUSED = "401 (Unauthorized)"


async def test_a_wrong_token_is_refused_and_the_right_one_opens_the_console(console: Console) -> None:
    console.expected.append(REFUSED)
    page = console.page
    await console.open()
    token = page.get_by_label("Gateway token")
    for wrong, answer in (
        ("wrong", "not the gateway’s"),
        ("two words", "no spaces"),
        ("naïve", "plain characters"),
        ("", "Type the token"),
    ):
        await token.fill(wrong)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert").filter(has_text=answer)).to_be_visible()
        await expect(token).to_have_attribute("aria-invalid", "true")
        assert await page.evaluate("sessionStorage.length") == 0
    await expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    await token.fill(f" {console.gateway.token}\n")
    await token.press("Enter")
    await expect(page.get_by_role("heading", name="Jobs", level=1)).to_be_focused()
    await expect(page.get_by_text("No jobs yet.")).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("heading", name="Jobs", level=1)).to_be_visible()


async def test_the_token_is_kept_in_its_tab_only_and_until_sign_out(console: Console) -> None:
    page = console.page
    await console.sign_in()
    kept = await page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
    assert console.gateway.token in kept[0]
    assert console.gateway.token not in kept[1] + kept[2]
    other = await page.context.new_page()
    await other.goto(f"{console.gateway.url}/console/")
    await expect(other.get_by_label("Gateway token")).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_text("You have signed out.")).to_be_visible()
    assert await page.evaluate("sessionStorage.length") == 0


async def test_a_token_that_is_refused_later_leads_back_to_the_login(console: Console) -> None:
    console.expected.append(REFUSED)
    page = console.page
    await console.sign_in()
    await page.evaluate("sessionStorage.setItem('millrace.token', 'changed-since')")
    await expect(page.get_by_text("The token is no longer accepted.")).to_be_visible()
    await expect(page.get_by_label("Gateway token")).to_be_focused()


async def test_a_gateway_that_is_away_is_told_and_found_again(console: Console) -> None:
    console.expected.append("ERR_INTERNET_DISCONNECTED")
    page = console.page
    await console.sign_in()
    await page.context.set_offline(True)
    await expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
    await page.context.set_offline(False)
    await expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_hidden()
