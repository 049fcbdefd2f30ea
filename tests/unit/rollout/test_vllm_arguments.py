"""What of a job's spec makes another engine."""

from __future__ import annotations

from pathlib import Path

from services.common.spec.job import JobSpec
from services.rollout.engine.process import _arguments, engine_key


def spec(**model: object) -> JobSpec:
    return JobSpec.model_validate(
        {"model": {"path": "tiny"} | model, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}
    )


def test_an_fp32_output_layer_is_the_engines_too_and_makes_another_engine(tmp_path: Path) -> None:
    plain, fine = spec(), spec(fp32_output_layer=True)
    assert _arguments(fine)["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in _arguments(plain)
    assert engine_key(tmp_path, plain) == engine_key(tmp_path, spec())
    assert engine_key(tmp_path, plain) != engine_key(tmp_path, fine)
