from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
import redis.asyncio
from playwright.async_api import expect

from services.common.jobs.store import JobStore
from services.common.redis import keys
from tests.integration.console.conftest import Console
from tests.integration.console.scene import HOSTILE, crowded

ROOT = Path(__file__).parents[3]
OTHER = "other-0a1b2c3d"
"""Id of a second job, whose steps differ."""
VIEWS = [
    "#/jobs",
    "#/workers",
    "#/submit",
    "#/jobs/{id}",
    "#/jobs/{id}/samples",
    "#/jobs/{id}/events",
    "#/jobs/{id}/spec",
    "#/jobs?search=n&sort=reward",
    "#/compare/{id},{other}",
    "#/chat/{id}",
]

CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest('[hidden], .unseen, noscript, option, :disabled') || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(element.closest('svg') ? style.fill : style.color)), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${element.tagName}.${element.getAttribute('class')}`;
    if (contrast < 4.5) poor.push(`${name} ${contrast.toFixed(2)} ${element.textContent.slice(0, 30)}`);
  }
  return poor;
}"""

UNNAMED = """() => {
  const faults = [];
  const named = (e) => e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby')
    || (e.matches('a, button, figure') && e.textContent.trim());
  for (const e of document.querySelectorAll('input, select, textarea, button, a, nav, dialog')) {
    if (e.id !== 'dialog' && !named(e)) faults.push(`without a name: ${e.outerHTML}`);
  }
  for (const e of document.querySelectorAll('[onclick], div[tabindex="0"], span[tabindex]')) faults.push(`not a button: ${e.outerHTML}`);
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  faults.push(...ids.filter((id, i) => ids.indexOf(id) !== i).map((id) => `id twice: ${id}`));
  for (const [what, wanted] of [['h1', 1], ['main', 1], ['body > header', 1]]) {
    const count = document.querySelectorAll(what).length;
    if (count !== wanted) faults.push(`${count} × ${what}`);
  }
  for (const e of document.querySelectorAll('[aria-describedby], [aria-labelledby], label[for]')) {
    for (const id of (e.getAttribute('aria-describedby') ?? e.getAttribute('aria-labelledby') ?? e.htmlFor).split(' ')) {
      if (e.id !== 'dialog' && !document.getElementById(id)) faults.push(`names no element: ${id}`);
    }
  }
  return faults;
}"""


@pytest_asyncio.fixture(loop_scope="session")
async def job_id(store: JobStore, redis: redis.asyncio.Redis, document: dict[str, Any]) -> str:
    job_id = await crowded(store, redis, {**document, "tags": ["t" * 60], "notes": HOSTILE.replace("\x00", "")})
    record: Any = await redis.hgetall(keys.record(job_id))
    await redis.hset(
        keys.record(OTHER), mapping=record | {"spec": record[b"spec"].replace(b'"steps":20', b'"steps":30')}
    )
    await redis.zadd(keys.JOBS, {OTHER: 1e9})
    return job_id


async def drawn(console: Console, view: str, job_id: str) -> None:
    """Opens the view and waits until it stands."""
    await console.open(view.replace("{id}", job_id).replace("{other}", OTHER))
    await expect(console.page.get_by_role("heading", level=1)).to_be_visible()
    await console.page.wait_for_load_state("networkidle") if "jobs/{id}" not in view else None
    await console.page.wait_for_timeout(700)


@pytest.mark.parametrize("width", [320, 360, 768, 1024, 1280])
async def test_no_view_scrolls_sideways(console: Console, job_id: str, width: int) -> None:
    await console.page.set_viewport_size({"width": width, "height": 780})
    await console.sign_in()
    for view in VIEWS:
        await drawn(console, view, job_id)
        wide = await console.page.evaluate(
            "() => [document.documentElement.scrollWidth, ...[...document.querySelectorAll('main *')]"
            ".filter((e) => e.checkVisibility() && !e.closest('pre, .editor, svg, thead'))"
            ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 90))]"
        )
        assert wide == [width], f"{view} at {width} px"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_is_legible_in_every_view(console: Console, job_id: str, scheme: Literal["light", "dark"]) -> None:
    await console.page.emulate_media(color_scheme=scheme)
    await console.sign_in()
    for view in VIEWS:
        await drawn(console, view, job_id)
        assert await console.page.evaluate(CONTRASTS) == [], view


async def test_every_control_has_a_name_and_every_view_one_heading(console: Console, job_id: str) -> None:
    await console.sign_in()
    for view in VIEWS:
        await drawn(console, view, job_id)
        assert await console.page.evaluate(UNNAMED) == [], view


async def test_the_theme_follows_the_system_until_one_is_chosen_and_stays_chosen(console: Console) -> None:
    page = console.page
    ground = "getComputedStyle(document.body).backgroundColor"
    await page.emulate_media(color_scheme="light")
    await console.sign_in()
    light = await page.evaluate(ground)
    await page.emulate_media(color_scheme="dark")
    dark = await page.evaluate(ground)
    sums = [sum(map(int, colour[4:-1].split(","))) for colour in (dark, light)]
    assert sums[0] < 100
    assert sums[1] > 600
    await page.get_by_role("button", name="Theme: system").click()
    await page.get_by_role("button", name="Theme: light").wait_for()
    assert await page.evaluate(ground) == light
    await page.reload()
    assert await page.evaluate(ground) == light
    await page.emulate_media(color_scheme="light")
    await page.get_by_role("button", name="Theme: light").click()
    assert await page.evaluate(ground) == dark
    await page.get_by_role("button", name="Theme: dark").click()
    assert await page.evaluate(ground) == light


async def test_the_command_takes_a_picture_of_each_view_light_and_dark_wide_and_narrow(
    console: Console, job_id: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(console.gateway.token)
    options = [
        "--url",
        console.gateway.url,
        "--token-file",
        str(tmp_path / "token"),
        "--job",
        job_id,
        "--others",
        OTHER,
        "--out",
        str(tmp_path / "images"),
    ]
    command = [sys.executable, str(ROOT / "docs" / "screenshots.py"), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)  # noqa: ASYNC221  nothing else runs here
    assert done.returncode == 0, done.stderr
    pictures = sorted(path.name for path in (tmp_path / "images").iterdir() if path.read_bytes().startswith(b"\x89PNG"))
    endings = ("", "-dark", "-phone", "-phone-dark")
    views = ("jobs", "job", "samples", "compare", "chat", "submit")
    assert pictures == sorted(f"console-{view}{ending}.png" for view in views for ending in endings)
    shown: dict[bytes, list[str]] = {}
    for name in pictures:
        shown.setdefault((tmp_path / "images" / name).read_bytes(), []).append(name)
    assert [names for names in shown.values() if len(names) > 1] == []
