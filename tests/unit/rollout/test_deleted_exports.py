"""An export that goes while it is loaded, for its job was deleted, is refused: the engine never gets weights that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import WeightSyncError
from services.common.weight_sync.staging import Stage
from services.common.weights.snapshot import PolicyVersion
from services.rollout.chat.exports import stage_export


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "half a file"])
def test_an_export_that_goes_while_it_is_loaded_is_never_staged(tmp_path: Path, left: str) -> None:
    export = tmp_path / "hf"
    if left != "nothing":
        export.mkdir()
    if left == "half a file":
        (export / "model.safetensors").write_bytes(b"\x40\0\0\0")
    stage = Stage(tmp_path / "stage")
    with pytest.raises(WeightSyncError, match="hf"):
        stage_export(export, stage, PolicyVersion(1, 2))
    assert list((tmp_path / "stage").iterdir()) == []
    stage.close()
