"""The tokenizer in its child: what it and templates do there fails the prompt, in bounded time, and neither blocks nor ends anything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.errors import ModelError, PromptError
from services.common.models.prompts import PromptEncoder
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Sandbox
from services.common.streams.types import Message
from services.rollout.engine import prompt_process
from services.rollout.engine.prompt_process import PromptProcess
from tests.integration.rollout.conftest import write_model
from tests.unit.common.models.test_prompts import TEMPLATE, save

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [Message("user", "one two")]
MOST = 10_000
Open = Callable[[str], "asyncio.Future[PromptProcess]"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(prepare=["services.common.models.prompts:prepare"]) as made:
        await made.start()
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_process, "REQUEST_S", 1.0)
    monkeypatch.setattr(prompt_process, "LIMITS", Limits(wall_s=30.0, memory_mib=512))


async def opened(sandbox: Sandbox, folder: Path, template: str = TEMPLATE) -> PromptProcess:
    prompts = PromptProcess(sandbox, save(folder, template))
    await prompts.open()
    return prompts


async def longest_silence(until: asyncio.Future[object]) -> float:
    """The longest time for which the event loop did not turn before this was done, seconds."""
    longest, last = 0.0, time.monotonic()
    while not until.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def test_prompts_and_texts_are_exactly_those_of_the_tokenizer_itself(sandbox: Sandbox, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    encoder, prompts = PromptEncoder(tmp_path / "tiny"), PromptProcess(sandbox, tmp_path / "tiny")
    try:
        for content in ("12 + 7 =", "", "é\u2028 <b>\x00", "🦀" * 50, "<eos><user>", "a" * 3000):
            messages = [Message("user", content), Message("assistant", "no"), Message("user", "2")]
            values = [(message.role, message.content) for message in messages]
            assert await prompts.encode(messages, most_chars=MOST) == encoder.encode(values, MOST)
            if content:
                assert await prompts.encode_text(content) == encoder.encode_text(content)
        for rollouts in ([[65, 66, 1], [], [2, 3, 4]], [[number] for number in range(128)], [list(range(128)) * 20]):
            assert await prompts.decode(rollouts) == encoder.decode(rollouts)
    finally:
        await prompts.close()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", " refuses the prompt: ZeroDivisionError: division by zero"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took longer than 1 s"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}", "MiB|longer"),
        ("{{ 'a' * 300000000 }}", "300000000 characters|MiB|longer"),
        ("{{ ('a' * 100000000).split('a') }}", "needed more than 512 MiB|longer"),
        ("{{ 10 ** (10 ** 10) }}", "took longer than 1 s|OverflowError|MiB"),
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_a_hostile_template_fails_the_prompt_in_bounded_time_and_blocks_nobody(
    sandbox: Sandbox, tmp_path: Path, template: str, reason: str
) -> None:
    prompts = await opened(sandbox, tmp_path, template)
    for _ in range(2):  # and it is not worn out
        asking = asyncio.ensure_future(prompts.encode(ASK, most_chars=MOST))
        began = time.monotonic()
        silence = await longest_silence(asking)  # type: ignore[arg-type]
        with pytest.raises(PromptError, match=f"the model's chat template.*({reason})"):
            asking.result()
        assert time.monotonic() - began < 20.0
        assert silence < 1.0
    await prompts.close()


@pytest.mark.usefixtures("impatient")
async def test_after_a_prompt_that_took_too_long_the_next_one_has_a_new_process_and_nobody_else_fails(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = f"{{% if messages[0].content == 'two' %}}{endless}{{% endif %}}ask: one"
    prompts = await opened(sandbox, tmp_path, template)
    for position in (0, 3):  # alone, and in a batch with others
        asked = [Message("user", "one") for _ in range(6)]
        asked[position] = Message("user", "two")
        found = await asyncio.gather(*(prompts.encode([one], most_chars=MOST) for one in asked), return_exceptions=True)
        assert isinstance(found.pop(position), PromptError)
        assert found == [[2, 3]] * 5
    await prompts.close()


async def test_a_process_that_is_killed_from_outside_is_replaced_and_fails_nobody(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    prompts = await opened(sandbox, tmp_path)
    assert prompts._child is not None
    os.kill(prompts._child._forked.pid, signal.SIGKILL)
    assert await prompts.encode(ASK, most_chars=MOST) == [2, 3, 4, 5]
    assert await prompts.decode([[3, 4]]) == ["one two"]
    await prompts.close()


async def test_a_request_that_is_cancelled_spoils_no_other(sandbox: Sandbox, tmp_path: Path) -> None:
    prompts = await opened(sandbox, tmp_path)
    for _ in range(5):
        asking = [asyncio.ensure_future(prompts.encode(ASK, most_chars=MOST)) for _ in range(4)]
        await asyncio.sleep(0)
        asking[0].cancel()
        assert await asyncio.gather(*asking[1:]) == [[2, 3, 4, 5]] * 3
    await prompts.close()


async def test_a_bridge_closes_a_turn_that_was_cut_and_a_template_that_closes_none_fails_the_prompt(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    closing = await opened(sandbox, tmp_path / "closing", TEMPLATE.replace("{% endfor %}", "<s> {% endfor %}"))
    assert await closing.bridge(ASK, last=1, most_chars=MOST) == [2, 3, 4, 1, 5]
    assert await closing.bridge(ASK, last=4, most_chars=MOST) == [1, 2, 3, 4, 1, 5]
    await closing.close()
    open_ended = await opened(sandbox, tmp_path / "open")
    with pytest.raises(PromptError, match="does not close an answer with a special token"):
        await open_ended.bridge(ASK, last=1, most_chars=MOST)
    await open_ended.close()


def regex(pattern: str) -> Callable[[dict[str, object]], None]:
    def put(document: dict[str, object]) -> None:
        document["pre_tokenizer"] = {
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip

    return put


@pytest.mark.usefixtures("impatient")
async def test_of_bridges_that_go_together_each_has_its_own_and_an_endless_one_fails_alone(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = TEMPLATE.replace("{% endfor %}", "<s> {% endfor %}")
    template += f"{{% if messages[-1].content == 'two' %}}{endless}{{% endif %}}"
    prompts = await opened(sandbox, tmp_path, template)
    asked = [([Message("user", text)], last) for text in ("one", "one two", "two", "two one") for last in (1, 4)]
    bridges = (prompts.bridge(messages, last=last, most_chars=MOST) for messages, last in asked)
    found = await asyncio.gather(*bridges, return_exceptions=True)
    for (messages, last), bridge in zip(asked, found, strict=True):
        if messages[0].content == "two":
            assert isinstance(bridge, PromptError)
            assert "took longer than 1 s" in str(bridge)
        else:
            assert bridge == await prompts.bridge(messages, last=last, most_chars=MOST)
    assert len({str(bridge) for bridge in found if isinstance(bridge, list)}) == 6
    with pytest.raises(PromptError, match="more than 2 characters"):
        await prompts.bridge(ASK, last=1, most_chars=2)
    await prompts.close()


async def test_a_text_that_is_no_text_fails_the_prompt(sandbox: Sandbox, tmp_path: Path) -> None:
    prompts = await opened(sandbox, tmp_path)
    with pytest.raises(PromptError, match="the model's tokenizer refuses the prompt: TypeError"):
        await prompts.encode_text("\ud800")
    await prompts.close()


@pytest.mark.usefixtures("impatient")
async def test_a_pathological_regex_of_a_tokenizer_fails_the_prompt(sandbox: Sandbox, tmp_path: Path) -> None:
    folder = save(tmp_path, "{{ messages[0].content }}")
    document = json.loads((folder / "tokenizer.json").read_text())
    regex(r"(a+)+$|(a|aa)+b")(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    prompts = PromptProcess(sandbox, folder)
    await prompts.open()
    began = time.monotonic()
    (found,) = await asyncio.gather(
        prompts.encode([Message("user", "a" * 5000 + "!")], most_chars=MOST), return_exceptions=True
    )
    assert isinstance(found, PromptError)
    assert "tokenizer" in str(found)
    assert time.monotonic() - began < 10.0
    await prompts.close()


def kind(document: dict[str, object]) -> None:
    document["model"] = {"type": "Nope"}


def huge_ids(document: dict[str, object]) -> None:
    document["model"] = {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 2**32 + 1}}


@pytest.mark.parametrize("spoil", [kind, huge_ids, regex("(")])
async def test_a_tokenizer_that_cannot_be_loaded_is_a_model_that_cannot_be(
    sandbox: Sandbox, tmp_path: Path, spoil: Callable[[dict[str, object]], None]
) -> None:
    folder = save(tmp_path, TEMPLATE)
    document = json.loads((folder / "tokenizer.json").read_text())
    spoil(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    prompts = PromptProcess(sandbox, folder)
    with pytest.raises(ModelError, match=f"{folder}: the tokenizer cannot be loaded"):
        await prompts.open()
    await prompts.close()
