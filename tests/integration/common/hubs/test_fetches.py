"""Fetches by the hubs' real libraries, from a hub on this machine that drops connections, stalls and refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from services.cli.stack.children import free_port
from services.common.config.settings import Settings
from services.common.errors import HubError, HubRefused
from services.common.hubs import fetcher as module
from services.common.hubs.fetcher import Fetcher
from services.common.models.directory import resolve_model
from services.common.sandbox.pool import Sandbox
from services.common.spec.reference import Reference, parse_reference
from tests.fake_hub import FakeHub
from tests.processes import is_at_work

MIB = 1024 * 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48,
    "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
WEIGHTS = os.urandom(6 * MIB)
MODEL = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"free",
    "model.safetensors": WEIGHTS,
}
BESIDE = {
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "onnx/model.onnx": b"",
    "original/consolidated.00.pth": b"a pickle",
}


def reference_of(name: str, text: str) -> Reference:
    return parse_reference(f"{name}:{text}")


async def pull(fetcher: Fetcher, reference: Reference) -> Path:
    """The place of a reference, fetched."""
    resolved = await fetcher.survey(reference)
    await fetcher.fetch(resolved)
    return fetcher.settings.hub_folder.path(resolved)


async def test_a_model_is_there_whole_with_nothing_that_can_run(hub: FakeHub, fetcher: Fetcher, name: str) -> None:
    commit = hub.add("models/org/tiny", MODEL | BESIDE)
    path = await pull(fetcher, reference_of(name, "org/tiny"))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == MODEL
    assert path == fetcher.settings.home / "hubs/models" / name / "org/tiny" / commit
    assert resolve_model(f"{name}:org/tiny@{commit}", fetcher.settings) == path.resolve()
    await fetcher.survey(reference_of(name, "org/tiny"))
    assert not list((fetcher.settings.home / "hubs/partial").iterdir())


async def test_a_branch_is_resolved_once_and_its_bytes_stay(hub: FakeHub, fetcher: Fetcher, name: str) -> None:
    first = hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of(name, "org/tiny"))
    hub.add("models/org/tiny", MODEL | {"model.safetensors": os.urandom(MIB)})
    await fetcher.fetch(resolved)
    assert resolved.revision == first
    assert (fetcher.settings.hub_folder.path(resolved) / "model.safetensors").read_bytes() == WEIGHTS
    hub.asked.clear()
    assert await fetcher.survey(resolved) == resolved
    await fetcher.fetch(resolved)
    assert hub.asked == []


async def test_a_data_file_is_fetched_alone(hub: FakeHub, fetcher: Fetcher, name: str) -> None:
    rows = b'{"prompt": "1 + 1 ="}\n' * 9
    commit = hub.add(
        "datasets/org/sums",
        {"README.md": b"", "easy/train.jsonl": rows, "easy/test.jsonl": b"", "hard/train.jsonl": b""},
    )
    path = await pull(fetcher, reference_of(name, "org/sums/easy/train.jsonl"))
    assert path == fetcher.settings.home / "hubs/data" / name / "org/sums" / commit / "easy/train.jsonl"
    assert path.read_bytes() == rows
    assert not any("README" in item.path or "hard" in item.path for item in hub.asked)


async def test_a_dropped_connection_goes_on_where_it_was(hub: FakeHub, fetcher: Fetcher, name: str) -> None:
    hub.add("models/org/tiny", MODEL)
    hub.drop_after, hub.drops = 2 * MIB, 2
    path = await pull(fetcher, reference_of(name, "org/tiny"))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    starts = [item.first_byte for item in hub.asked if "model.safetensors" in item.path and item.method == "GET"]
    assert max(starts) >= 2 * MIB


async def test_a_killed_fetch_goes_on_without_fetching_again_what_is_there(
    hub: FakeHub, fetcher: Fetcher, children: Sandbox, name: str
) -> None:
    hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of(name, "org/tiny"))
    hub.piece_s = 0.02
    fetching = asyncio.create_task(fetcher.fetch(resolved))
    while (await fetcher.progress(resolved)).bytes < 3 * MIB:
        await asyncio.sleep(0.02)
    assert not fetcher.is_complete(resolved)
    kill_children(children)
    hub.be_well()
    await fetching
    path = fetcher.settings.hub_folder.path(resolved)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    starts = [item.first_byte for item in hub.asked if "model.safetensors" in item.path and item.method == "GET"]
    assert starts
    assert min(starts) >= MIB
    assert not any(other in item.path for item in hub.asked for other in ("config.json", "tokenizer.json", "LICENSE"))


async def test_a_fetch_that_nobody_waits_for_ends_and_leaves_nothing_that_looks_whole(
    hub: FakeHub, fetcher: Fetcher, children: Sandbox, name: str
) -> None:
    hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of(name, "org/tiny"))
    hub.piece_s = 0.05
    fetching = asyncio.create_task(fetcher.fetch(resolved))
    while (await fetcher.progress(resolved)).bytes < MIB:
        await asyncio.sleep(0.02)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    while working(children):
        await asyncio.sleep(0.05)
    assert not fetcher.is_complete(resolved)
    assert not fetcher.settings.hub_folder.path(resolved).exists()
    hub.be_well()
    await fetcher.fetch(resolved)
    assert fetcher.is_complete(resolved)


async def test_two_jobs_share_one_fetch(hub: FakeHub, fetcher: Fetcher) -> None:
    hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of("hf", "org/tiny"))
    hub.asked.clear()
    hub.piece_s = 0.01
    impatient = asyncio.create_task(fetcher.fetch(resolved))
    both = [asyncio.create_task(fetcher.fetch(resolved)) for _ in range(2)]
    await asyncio.sleep(0.2)
    impatient.cancel()
    await asyncio.gather(*both)
    assert len([item for item in hub.asked if item.store]) == 1


async def test_surveys_of_one_model_at_once_leave_its_files_whole(hub: FakeHub, settings: Settings) -> None:
    hub.add("models/org/tiny", MODEL)
    hub.piece_s = 0.05
    environment = module.child_environment({}) | {"HF_ENDPOINT": hub.url}
    async with Fetcher(Sandbox(environment=environment), settings) as fetcher:
        first, second = await asyncio.gather(*(fetcher.survey(reference_of("hf", "org/tiny")) for _ in range(2)))
        assert first == second
        hub.be_well()
        path = await pull(fetcher, first)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == MODEL


async def test_a_part_that_is_longer_than_its_file_begins_anew(hub: FakeHub, fetcher: Fetcher, name: str) -> None:
    hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of(name, "org/tiny"))
    part = fetcher.settings.hub_folder.partial(resolved) / "parts" / "model.safetensors"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(WEIGHTS + b"more")
    path = await pull(fetcher, resolved)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


async def test_a_fetch_from_which_no_byte_comes_is_named_and_tried_again(
    hub: FakeHub, fetcher: Fetcher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TRIES", 2)
    hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of(name, "org/tiny"))
    hub.stall_after = 2 * MIB
    with pytest.raises(HubError, match=r"no byte came for 1 s: 2 tries brought no byte; what is there is kept"):
        await fetcher.fetch(resolved)
    hub.be_well()
    await fetcher.fetch(resolved)
    assert fetcher.is_complete(resolved)


async def test_tokens_go_to_the_hub_and_to_nobody_else(hub: FakeHub, fetcher: Fetcher) -> None:
    hub.add("models/org/tiny", MODEL)
    await pull(fetcher, reference_of("hf", "org/tiny"))
    assert all("of-these-tests" in item.token for item in hub.asked if not item.store)
    assert [item.token for item in hub.asked if item.store] == [""]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, r"has its weights as pickles only \(pytorch_model.bin\)"),
        ({"config.json": b"{}"}, "has no model.safetensors, nor an index of shards"),
        ({"model.safetensors": b""}, "has no config.json"),
        (
            MODEL
            | {
                "config.json": json.dumps(CONFIG | {"auto_map": {"AutoModel": "modeling.X"}}).encode(),
                "modeling.py": b"",
            },
            "config.json: `auto_map` asks for remote code, which is never run",
        ),
        (
            MODEL | {"config.json": json.dumps(CONFIG | {"architectures": ["T5ForConditionalGeneration"]}).encode()},
            r"config.json: architectures \['T5ForConditionalGeneration'\] is not supported",
        ),
    ],
)
async def test_a_model_that_may_not_be_used_is_refused_by_name_and_leaves_nothing(
    hub: FakeHub, fetcher: Fetcher, name: str, files: dict[str, bytes], message: str
) -> None:
    hub.add("models/org/bad", files)
    with pytest.raises(HubRefused, match=message):
        await fetcher.survey(reference_of(name, "org/bad"))
    assert [path for path in (fetcher.settings.home / "hubs").rglob("*") if path.is_file()] == []
    assert not any("model.safetensors" in item.path or ".bin" in item.path for item in hub.asked)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("org/other", "there is no such model"),
        ("org/tiny@no-such-branch", "has no revision 'no-such-branch'"),
        ("org/sums/trian.jsonl", "has no file trian.jsonl; did you mean train.jsonl"),
    ],
)
async def test_what_does_not_exist_is_named(hub: FakeHub, fetcher: Fetcher, name: str, text: str, message: str) -> None:
    hub.add("models/org/tiny", MODEL)
    hub.add("datasets/org/sums", {"train.jsonl": b""})
    with pytest.raises(HubRefused, match=message):
        await fetcher.survey(reference_of(name, text))


@pytest.mark.parametrize(("status", "message"), [(401, "TOKEN|token"), (403, "gated|refuses access")])
async def test_missing_access_says_what_to_set(
    hub: FakeHub, fetcher: Fetcher, name: str, status: int, message: str
) -> None:
    hub.add("models/org/tiny", MODEL)
    hub.repos["models/org/tiny"].status = status
    with pytest.raises(HubRefused, match=message) as caught:
        await fetcher.survey(reference_of(name, "org/tiny"))
    assert "of-these-tests" not in str(caught.value)


async def test_a_hub_that_is_down_is_no_fault_of_the_job(hub: FakeHub, fetcher: Fetcher) -> None:
    hub.add("models/org/tiny", MODEL)
    hub.repos["models/org/tiny"].status = 500
    with pytest.raises(HubError, match="answers 500"):
        await fetcher.survey(reference_of("hf", "org/tiny"))


async def test_a_hub_that_nobody_answers_for_is_no_fault_of_the_job(settings: Settings) -> None:
    environment = module.child_environment({}) | {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    async with Fetcher(Sandbox(environment=environment), settings) as lonely:
        with pytest.raises(HubError, match="does not answer: ConnectError"):
            await lonely.survey(reference_of("hf", "org/tiny"))


async def test_what_is_too_large_is_refused_before_a_byte_of_it_comes(
    hub: FakeHub, children: Sandbox, tmp_path: Path, name: str
) -> None:
    hub.add("models/org/tiny", MODEL)
    small = Fetcher(children, Settings(home=tmp_path, max_hub_bytes=5_000_000))  # type: ignore[arg-type]
    with pytest.raises(HubRefused, match=r"takes 6\.3 MB, and MILLRACE_MAX_HUB_BYTES allows 5\.0 MB"):
        await small.survey(reference_of(name, "org/tiny"))
    assert not any("resolve" in item.path or "FilePath" in item.path for item in hub.asked)


async def test_a_hub_that_the_site_forbids_is_not_asked(hub: FakeHub, children: Sandbox, tmp_path: Path) -> None:
    hub.add("models/org/tiny", MODEL)
    forbidden = Fetcher(children, Settings(home=tmp_path, hubs=["modelscope"]))
    with pytest.raises(HubRefused, match=r"nothing is fetched from hf here \(MILLRACE_HUBS allows: modelscope\)"):
        await forbidden.survey(reference_of("hf", "org/tiny"))
    with pytest.raises(HubRefused, match="nothing is fetched from hf here"):
        await forbidden.fetch(reference_of("hf", f"org/tiny@{'0' * 40}"))
    assert hub.asked == []


async def test_bytes_that_the_hub_does_not_list_are_thrown_away(
    hub: FakeHub, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TRIES", 1)
    commit = hub.add("models/org/tiny", MODEL)
    resolved = await fetcher.survey(reference_of("hf", "org/tiny"))
    hub.repos["models/org/tiny"].commits[commit] = MODEL | {"model.safetensors": WEIGHTS[:-1] + b"?"}
    with pytest.raises(HubError, match=r"model\.safetensors is not what the hub lists: its sha256 differs"):
        await fetcher.fetch(resolved)
    hub.repos["models/org/tiny"].commits[commit] = MODEL
    await fetcher.fetch(resolved)
    assert fetcher.is_complete(resolved)


def working(children: Sandbox) -> list[psutil.Process]:
    """The children that run."""
    if children.pid is None:
        return []
    return [child for child in psutil.Process(children.pid).children() if is_at_work(child.pid)]


def kill_children(children: Sandbox) -> None:
    for child in working(children):
        os.kill(child.pid, signal.SIGKILL)
