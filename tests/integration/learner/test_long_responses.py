"""A response of 32 k tokens on two ranks that share its positions: what one rank computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.learner.rank_runs import HERE, TIMEOUT_S, run
from tests.integration.learner.test_trainer import update_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]


def test_two_ranks_train_on_a_long_response_as_one_does(tmp_path: Path) -> None:
    script = str(HERE / "long_ranks.py")
    run([script, str(tmp_path), "make"])
    for ranks in (1, 2):
        run(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script, str(tmp_path)])
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    for expected, found in zip(one, two, strict=True):
        assert (found["skipped"], found["micro_batches"], found["sequences"]) == ("", 1, 2)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    one, two = (load_file(tmp_path / f"{ranks}.logprobs.safetensors")["logprobs"] for ranks in (1, 2))
    assert float((two - one).abs().max()) < 1e-5
    before = load_file(tmp_path / "model" / "model.safetensors")
    one, two = (load_file(tmp_path / f"{ranks}.safetensors") for ranks in (1, 2))
    assert update_error(two, one, before, least=0.1) < 1e-5
