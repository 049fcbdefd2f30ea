"""Folder of what came from hubs: only what is whole is in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.config.hub_folder import FILES, PLAN, HubFolder
from services.common.config.settings import Settings
from services.common.data.source import open_source
from services.common.errors import ConfigError, DataError, ModelError
from services.common.models.directory import resolve_model
from services.common.spec.data import DataSourceSpec
from services.common.spec.reference import Reference

COMMIT = "7ae557604adf67be50417f59c2c2f167def9a775"
MODEL = Reference("hf", "org/name", COMMIT)
ROWS = Reference("modelscope", "org/rows", COMMIT, "a/train.jsonl")
ROW = b'{"prompt": "1 + 1 =", "data_source": "sums", "ground_truth": "2"}\n'


def fetched(folder: HubFolder, reference: Reference, content: bytes = b"x") -> Path:
    """A fetch that is about to be finished; its only file."""
    file = folder.partial(reference) / FILES / (reference.file or "config.json")
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("reference", [MODEL, ROWS])
def test_what_is_fetched_is_whole_once_it_is_moved_and_gone_once_it_is_removed(
    tmp_path: Path, reference: Reference
) -> None:
    folder = HubFolder(tmp_path / "hubs")
    fetched(folder, reference)
    assert not folder.is_complete(reference)
    folder.finish(reference)
    assert folder.is_complete(reference)
    assert not folder.partial(reference).exists()
    assert [item.reference for item in folder.stored(data=bool(reference.file))] == [reference]
    assert list(folder.stored(data=not reference.file)) == []
    assert folder.remove(reference)
    assert not folder.is_complete(reference)
    assert not folder.remove(reference)
    assert [path for path in folder.root.rglob("*") if path.is_file()] == []


def test_what_an_interrupted_fetch_has_left_is_listed_as_not_whole(tmp_path: Path) -> None:
    folder = HubFolder(tmp_path)
    fetched(folder, ROWS, b"12345")
    (folder.partial(ROWS) / PLAN).write_text(json.dumps({"reference": str(ROWS)}))
    (item,) = folder.stored(data=True)
    assert (item.reference, item.whole) == (ROWS, False)
    assert item.size_bytes >= 5
    assert list(folder.stored(data=False)) == []


def test_a_branch_is_never_complete(tmp_path: Path) -> None:
    folder = HubFolder(tmp_path)
    folder.path(MODEL.at("main")).mkdir(parents=True)
    assert not folder.is_complete(MODEL.at("main"))


def test_references_that_look_alike_lie_apart(tmp_path: Path) -> None:
    folder = HubFolder(tmp_path)
    alike = [
        Reference("hf", "a--b/c", COMMIT),
        Reference("hf", "a/b--c", COMMIT),
        Reference("modelscope", "a/b--c", COMMIT),
    ]
    assert len({folder.path(item) for item in alike}) == len({folder.partial(item) for item in alike}) == len(alike)


def test_a_job_finds_what_was_fetched(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    for reference, content in ((MODEL, b"{}"), (ROWS, ROW * 3)):
        fetched(settings.hub_folder, reference, content)
        settings.hub_folder.finish(reference)
    assert resolve_model(str(MODEL), settings) == settings.hub_folder.path(MODEL).resolve()
    assert len(open_source(DataSourceSpec(source=str(ROWS)), settings)) == 3


def test_what_is_not_fetched_is_named_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with pytest.raises(
        ModelError, match=f"model.path: {MODEL} is not there: fetch it with `millrace models pull {MODEL}`"
    ):
        resolve_model(str(MODEL), settings)
    with pytest.raises(
        DataError, match=f"data.train.source: {ROWS} is not there: fetch it with `millrace data pull {ROWS}`"
    ):
        open_source(DataSourceSpec(source=str(ROWS)), settings)


def test_beyond_loopback_nothing_is_fetched_until_the_site_says_so() -> None:
    assert Settings().allowed_hubs == ("hf", "modelscope")
    assert Settings(bind_host="0.0.0.0").allowed_hubs == ()  # noqa: S104
    assert Settings(gateway_hosts=["train.example.org"]).allowed_hubs == (), "others reach it through the proxy"
    assert Settings(bind_host="0.0.0.0", hubs=["modelscope"]).allowed_hubs == ("modelscope",)  # noqa: S104
    assert Settings(hubs=[]).allowed_hubs == ()


def test_a_hub_that_is_not_known_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.common.config.settings import load_settings

    monkeypatch.setenv("MILLRACE_HUBS", '["hugging"]')
    with pytest.raises(ConfigError, match=r"MILLRACE_HUBS: 'hugging' is no hub that is known here \(hf, modelscope\)"):
        load_settings()
