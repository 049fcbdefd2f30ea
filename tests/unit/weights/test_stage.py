from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from services.common.errors import ConfigError, WeightSyncError
from services.common.weight_sync.staging import Stage, StagedWeights, default_stage_directory
from services.common.weights.snapshot import Snapshot, TensorSpec, UInt8Array
from services.common.weights.tensor_file import layout, map_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def snapshot(n: int = 0) -> tuple[Snapshot, dict[str, torch.Tensor]]:
    """Odd sizes, a scalar and an empty tensor, narrow dtypes before wide ones."""
    torch.manual_seed(n)
    tensors = {
        "b": torch.randn(3, 5).to(torch.bfloat16),
        "scalar": torch.randn(()).half(),
        "empty": torch.zeros(0, 4),
        "c": torch.randn(7),
        "name with ümläut": torch.randn(1, 1, 3).half(),
    }
    names = {torch_dtype: name for name, torch_dtype in DTYPES.items()}
    plain: dict[str, tuple[str, tuple[int, ...], UInt8Array]] = {
        name: (names[t.dtype], tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy()) for name, t in tensors.items()
    }
    return Snapshot.build(1, n, plain), tensors


def put(stage: Stage, source: Snapshot) -> StagedWeights:
    with stage.begin(source.lineage, source.n, source.tensors) as writer:
        for spec, data in zip(source.tensors, source.data, strict=True):
            middle = data.nbytes // 2
            writer.write(spec.name, middle, data[middle:].data)
            writer.write(spec.name, 0, data[:middle].data)
        return writer.commit(fetch_s=0.1, wire_bytes=7)


def test_the_safetensors_library_reads_every_staged_tensor_bit_for_bit(tmp_path: Path) -> None:
    source, tensors = snapshot(3)
    staged = put(Stage(tmp_path / "s"), source)
    loaded = load_file(staged.path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(staged.path, framework="pt") as file:
        assert file.metadata() == {"lineage": "1", "policy_version": "3"}
    assert staged.digests == {spec.name: spec.digest.hex() for spec in source.tensors}
    assert (staged.lineage, staged.policy_version, staged.total_bytes) == (1, 3, source.total_bytes)


def test_mapped_tensors_are_the_plain_bytes(tmp_path: Path) -> None:
    source, _ = snapshot()
    mapped = map_tensors(put(Stage(tmp_path / "s"), source).path)
    for spec, data in zip(source.tensors, source.data, strict=True):
        np.testing.assert_array_equal(mapped[spec.name], data)


def test_a_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    staged = put(Stage(tmp_path / "s"), snapshot()[0])
    whole = staged.path.read_bytes()
    for content in (whole[:-1], whole[:40], whole + b"x", b"", b"\xff" * 64):
        broken = tmp_path / "broken"
        broken.write_bytes(content)
        with pytest.raises(WeightSyncError, match="broken"):
            map_tensors(broken)
    with pytest.raises(WeightSyncError, match="missing"):
        map_tensors(tmp_path / "missing")


def test_nothing_has_its_final_name_before_the_commit(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "s")
    source, _ = snapshot()
    with stage.begin(1, 0, source.tensors) as writer:
        writer.write("c", 0, b"1234")
        assert [path.suffix for path in stage.directory.iterdir()] == [".part"]
    assert list(stage.directory.iterdir()) == []
    with pytest.raises(WeightSyncError, match="already committed or discarded"):
        writer.commit(fetch_s=0.0, wire_bytes=0)


def test_the_newest_two_versions_stay(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "s")
    staged = [put(stage, snapshot(n)[0]) for n in range(4)]
    assert [weights.path.exists() for weights in staged] == [False, False, True, True]
    assert len(list(stage.directory.iterdir())) == 2


def test_what_a_killed_predecessor_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from services.common.weights.snapshot import TensorSpec; from services.common.weight_sync.staging import Stage\n"
        "stage = Stage(Path(sys.argv[1])); specs = [TensorSpec('w', 'float32', (2,), 8, bytes(16))]\n"
        "stage.begin(1, 0, specs).commit(fetch_s=0.0, wire_bytes=0); stage.begin(1, 1, specs)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    directory = tmp_path / "s"
    done = subprocess.run([sys.executable, "-c", code, str(directory)], check=False, timeout=60)
    assert done.returncode == -9
    (directory / "notes.txt").write_text("not ours")
    assert sorted(path.suffix for path in directory.iterdir()) == [".part", ".safetensors", ".txt"]
    Stage(directory)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_a_directory_in_use_is_refused_until_it_is_given_up(tmp_path: Path) -> None:
    first = Stage(tmp_path / "s")
    put(first, snapshot()[0])
    with pytest.raises(ConfigError, match="in use"):
        Stage(tmp_path / "s")
    first.close()
    assert not (tmp_path / "s").exists()
    Stage(tmp_path / "s").close()


def test_no_room_is_an_error_that_names_the_directory_and_leaves_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "s")
    huge = TensorSpec("w", "float32", (1 << 50,), 1 << 52, bytes(16))
    with pytest.raises(WeightSyncError, match=re.escape(str(tmp_path / "s"))):
        stage.begin(1, 0, [huge])
    assert list(stage.directory.iterdir()) == []
    with pytest.raises(WeightSyncError, match="w: the name occurs twice"):
        stage.begin(1, 0, [TensorSpec("w", "float32", (), 4, bytes(16))] * 2)
    assert list(stage.directory.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/below"):
        Stage(tmp_path / "file" / "below")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="link"):
        Stage(tmp_path / "link")


def test_every_tensor_begins_at_a_multiple_of_its_element() -> None:
    source, _ = snapshot()
    plan = layout([(spec.name, spec.dtype, spec.shape) for spec in source.tensors], {})
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    assert all(plan.offsets[spec.name] % sizes[spec.dtype] == 0 for spec in source.tensors)
    assert len(plan.header) % 8 == 0


def test_stacks_with_homes_of_their_own_stage_apart(tmp_path: Path) -> None:
    assert len({default_stage_directory("r0", Path(home), 0, tmp_path) for home in ("a", "b")}) == 2


def test_shared_memory_is_used_only_when_it_has_room(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    room = free.f_bavail * free.f_frsize
    shared = default_stage_directory("r0", Path("home"), 1, tmp_path)
    assert shared.parent == tmp_path
    assert shared.name.startswith("millrace-")
    assert shared.name.endswith("-r0")
    assert shared == default_stage_directory("r0", Path("home"), 1, tmp_path)
    assert default_stage_directory("r0", Path("home"), room * 2, tmp_path) == Path("home/stage/r0")
    assert default_stage_directory("r0", Path("home"), 1, tmp_path / "missing") == Path("home/stage/r0")
    shared.symlink_to(tmp_path)  # as another user of this machine may, who knows the name
    assert default_stage_directory("r0", Path("home"), 1, tmp_path) == Path("home/stage/r0")
    with pytest.raises(ConfigError, match=r"'\.\./x'"):
        default_stage_directory("../x", Path("home"), 1, tmp_path)
