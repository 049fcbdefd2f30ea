"""What is written beside the training is a sound safetensors file with the digest of what was meant, or an error with its number."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from services.common.checkpoints.manifest import WrittenFile, digest_of_file
from services.learner.training import tensor_file
from services.learner.training.background import BackgroundWriter
from services.learner.training.tensor_file import write_tensors


def test_the_library_reads_back_what_was_written_and_the_digest_is_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "step": torch.tensor(3.0),
        "none": torch.zeros(0, 2),
        "rng": torch.get_rng_state(),
        "ids": torch.arange(6).reshape(2, 3),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(1).half(),
        "double": torch.randn(2).double(),
    }
    written = write_tensors(tmp_path, "x.safetensors", tensors, {"about": "é"})
    path = tmp_path / written.name
    assert (written.bytes, written.xxh3) == (path.stat().st_size, digest_of_file(path))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"about": "é"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            got = file.get_tensor(name)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)


def test_the_report_comes_when_all_is_written_and_an_error_keeps_its_number() -> None:
    writer, go = BackgroundWriter(), threading.Event()

    def slow() -> list[WrittenFile]:
        go.wait(10)
        return [WrittenFile("a", 1, "ff")]

    def full() -> list[WrittenFile]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x")

    writer.start(slow)
    assert not writer.report
    with pytest.raises(RuntimeError, match="still being written"):
        writer.start(full)
    go.set()
    writer.join()
    reports = [writer.report]
    assert reports == [{"files": [{"name": "a", "bytes": 1, "xxh3": "ff"}], "errno": None, "error": ""}]
    writer.start(full)
    writer.join()
    assert writer.report == {
        "files": [],
        "errno": errno.ENOSPC,
        "error": "OSError: [Errno 28] No space left on device: '/x'",
    }
