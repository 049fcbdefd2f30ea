"""Weights go from Hugging Face to Megatron and back, in every layout, with every bit; what is not fit leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.common.checkpoints.manifest import MANIFEST, newest_manifest, read_manifest, verify_files
from services.learner.conversion.report import inspect
from services.learner.conversion.request import Conversion, Direction
from services.learner.conversion.run import run as convert
from tests.integration.learner.layouts_cases import MODELS
from tests.integration.learner.peers import ROOT
from tests.integration.learner.rank_runs import HERE, TIMEOUT_S, run

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
SOURCES = [f"{model}{suffix}" for model in MODELS for suffix in ("", "-bfloat16")]
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)  # the first test waits for the conversions


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what `conversion_runs` has made of them."""
    made = tmp_path_factory.mktemp("conversion")
    run([str(HERE / "layouts_reference.py"), str(made)])
    run([str(HERE / "conversion_runs.py"), str(made)])
    return made


def said(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "converted.json").read_text())
    return found


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
class TestThereAndBack:
    def test_every_tensor_has_every_bit_and_every_other_file_every_byte(
        self, root: Path, source: str, tp: int, pp: int
    ) -> None:
        made = root / "converted" / f"{source}.{tp}.{pp}.hf"
        before, after = load_file(root / source / "model.safetensors"), load_file(made / "model.safetensors")
        assert before.keys() == after.keys()
        assert [name for name, tensor in before.items() if tensor.dtype != after[name].dtype] == []
        assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
        texts = sorted(file.name for file in (root / source).iterdir() if file.suffix != ".safetensors")
        assert sorted(file.name for file in made.iterdir()) == sorted([*texts, "model.safetensors"])
        assert all((made / name).read_bytes() == (root / source / name).read_bytes() for name in texts)

    def test_the_checkpoint_between_has_a_file_for_each_rank_and_verifies(
        self, root: Path, source: str, tp: int, pp: int
    ) -> None:
        checkpoint = read_manifest(root / "converted" / f"{source}.{tp}.{pp}.megatron")
        verify_files(checkpoint)
        assert len([file for file in checkpoint.files if file.name.startswith("rank-")]) == tp * pp
        report = inspect(checkpoint.path)
        model = inspect(root / source)
        assert (report.verified, report.problems, report.weights_only) == (True, [], True)
        assert (report.parameters, report.dtype) == (model.parameters, model.dtype)
        assert (report.architecture, report.shape) == (model.architecture, model.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_trainer_of_one_rank_begins_with_the_files_of_four(root: Path, source: str, dtype: str) -> None:
    assert said(root)["begun"][f"{source}.2.2 {dtype}"] == {"step": 0, "different": []}


def command(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """`millrace weights …` in the folder, in a process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MILLRACE_HOME": str(root / "home")}
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "weights", *arguments],
        cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


class TestCommands:
    def test_to_megatron_and_to_hf_are_the_way_there_and_back(self, root: Path) -> None:
        there = command(root, "to-megatron", "qwen3", "mine", "--tp", "2", "--json")
        out, errors = there.communicate(timeout=TIMEOUT_S)
        assert there.returncode == 0, errors
        assert json.loads(out)["parameters"] == inspect(root / "qwen3").parameters
        back = command(root, "to-hf", "mine", "back", "--dtype", "bfloat16")
        out, errors = back.communicate(timeout=TIMEOUT_S)
        assert back.returncode == 0, errors
        assert str(root / "back") in out
        before, after = (load_file(root / name / "model.safetensors") for name in ("qwen3", "back"))
        assert all(torch.equal(after[name], tensor.bfloat16()) for name, tensor in before.items())
        config = json.loads((root / "back" / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
        modes = {path.stat().st_mode & 0o777 for name in ("mine", "back") for path in (root / name).rglob("*.*")}
        assert modes == {(root / "mine").stat().st_mode & 0o666}, "whoever may read the folder may read its files"
        assert left(root) == []

    def test_an_interrupted_conversion_leaves_nothing_and_ends_its_process(self, root: Path) -> None:
        process = command(root, "to-hf", "converted/llama.2.2.megatron", "never")
        until = time.monotonic() + TIMEOUT_S
        while not left(root):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, errors.strip()) == (130, "interrupted: nothing was written")
        assert left(root) == []
        assert not (root / "never").exists()


def left(folder: Path) -> list[Path]:
    """Unfinished folders."""
    return list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda checkpoint: (checkpoint / MANIFEST).unlink(), "is no checkpoint: it has no MANIFEST.json"),
        (
            lambda checkpoint: flip(checkpoint / "rank-00001.safetensors"),
            "rank-00001.safetensors: its checksum differs",
        ),
    ],
    ids=["no manifest", "a changed file"],
)
def test_what_does_not_verify_is_named_and_nothing_is_written(
    root: Path, tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(root / "converted" / "llama.2.2.megatron", copied)
    spoil(copied)
    with pytest.raises(Exception, match=words.replace(".", r"\.")):
        convert(Conversion(Direction.TO_HUGGING_FACE, str(copied), str(tmp_path / "out"), home=str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied"]
    assert newest_manifest(tmp_path) is None


def flip(file: Path) -> None:
    """Changes the last bit."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
