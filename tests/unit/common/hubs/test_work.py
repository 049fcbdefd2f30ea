"""Work of the child that fetches, as far as it needs no hub."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from services.common.errors import HubError, HubRefused
from services.common.hubs import work
from services.common.hubs.fetcher import child_environment
from services.common.hubs.repository import HubFile, require_content
from services.common.sandbox.processes import HUB_TOKENS, Forkserver


def test_a_fetch_for_which_the_disk_has_no_room_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(HubRefused, match=r"needs 1000000000\.0 GB more, and the disk of .* has .* left"):
        work._require_room(tmp_path, [HubFile("model.safetensors", 10**18)])


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOSPC, HubRefused, "the disk is full: what was fetched is kept"),
        (errno.EACCES, HubRefused, "cannot be written"),
        (errno.ECONNREFUSED, HubError, "refused"),
    ],
)
def test_an_error_of_the_disk_is_final_and_one_of_the_network_is_not(
    number: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message), work._disk():
        raise OSError(number, "refused")


@pytest.mark.parametrize(
    "file",
    [HubFile("a", 4), HubFile("a", 3, sha256="0" * 64), HubFile("a", 3, blob="0" * 40)],
)
def test_content_that_the_hub_does_not_list_is_removed(tmp_path: Path, file: HubFile) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with pytest.raises(HubError, match="a is not what the hub lists"):
        require_content(path, file, lambda: None)
    assert not path.exists()


def test_content_that_the_hub_lists_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"hello\n")
    require_content(path, HubFile("a", 6, blob="ce013625030ba8dba906f756967f9e9ca394464a"), lambda: None)
    assert path.exists()


def test_only_the_child_that_fetches_gets_the_hubs_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    (tmp_path / "empty").write_text("")
    given = {
        "HF_TOKEN": "a",
        "MODELSCOPE_API_TOKEN_FILE": str(tmp_path / "token"),
        "HUGGING_FACE_HUB_TOKEN_FILE": str(tmp_path / "empty"),
    }
    environment = child_environment(given)
    assert (environment["HF_TOKEN"], environment["MODELSCOPE_API_TOKEN"]) == ("a", "from-a-file")
    assert "HUGGING_FACE_HUB_TOKEN" not in environment
    for name in HUB_TOKENS:
        monkeypatch.setenv(name, "secret")
    assert not set(HUB_TOKENS) & Forkserver("package.module:work", service="check")._environment.keys()
