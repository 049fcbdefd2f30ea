"""What follows from the machine is settled once, when a job is accepted, and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Platform, Settings
from services.common.service.host import multiplies_bfloat16
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.gateway.admission import automatic
from services.gateway.admission.automatic import settle
from services.gateway.admission.limits import Machine

MACHINE = Machine(cores=16, memory_bytes=1 << 34)


def spec_of(model: dict[str, Any] | None = None, learner: dict[str, Any] | None = None) -> JobSpec:
    document = {"data": {"train": {"source": "reasoning_gym:chain_sum"}}, "model": {"path": "tiny"} | (model or {})}
    return JobSpec.model_validate(document | {"learner": learner or {}})


@pytest.mark.parametrize(
    ("platform", "native", "dtype"),
    [
        (Platform.CPU, True, DType.BFLOAT16), (Platform.CPU, False, DType.FLOAT32),
        (Platform.CUDA, False, DType.BFLOAT16), (Platform.NPU, False, DType.BFLOAT16),
    ],
)  # fmt: skip
def test_an_automatic_dtype_is_bfloat16_where_the_processors_multiply_it(
    monkeypatch: pytest.MonkeyPatch, platform: Platform, native: bool, dtype: DType
) -> None:
    monkeypatch.setattr(automatic, "multiplies_bfloat16", lambda: native)
    settled = settle(spec_of({"dtype": "auto"}), Settings(platform=platform), MACHINE)
    assert settled.model.dtype is dtype
    assert settle(spec_of({"dtype": "float32"}), Settings(platform=platform), MACHINE).model.dtype is DType.FLOAT32


@pytest.mark.parametrize(
    ("learner", "cores", "threads"),
    [({}, None, 8), ({}, 6, 6), ({"tensor_parallel_size": 2}, 6, 3), ({"data_parallel_size": 9}, 6, 1)],
)
def test_automatic_threads_are_the_learners_cores_over_its_ranks(
    learner: dict[str, Any], cores: int | None, threads: int
) -> None:
    settings = Settings(learner_cores=cores)
    settled = settle(spec_of(learner=learner | {"threads_per_rank": 0}), settings, MACHINE)
    assert settled.learner.threads_per_rank == threads
    assert settle(spec_of(learner={"threads_per_rank": 3}), settings, MACHINE).learner.threads_per_rank == 3


def test_automatic_threads_are_shared_with_ranks_of_other_roles() -> None:
    document = spec_of(learner={"threads_per_rank": 0}).model_dump()
    spec = JobSpec.model_validate(document | {"reference": {"placement": "own"}})
    assert settle(spec, Settings(learner_cores=6), MACHINE).learner.threads_per_rank == 3


def test_a_settled_spec_is_valid_and_settled_for_good() -> None:
    settled = settle(spec_of({"dtype": "auto"}, {"threads_per_rank": 0}), Settings(), MACHINE)
    again = JobSpec.model_validate(settled.model_dump(mode="json"))
    assert again == settled == settle(again, Settings(learner_cores=1), MACHINE)


@pytest.mark.parametrize(
    ("flags", "native"), [("avx512f avx512_bf16 amx_tile", True), ("asimd bf16", True), ("avx2 avx512f", False)]
)
def test_processors_that_multiply_bfloat16_say_so(tmp_path: Path, flags: str, native: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: a bf16-like name\nflags\t\t: fpu {flags}\n")
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is native
    assert not multiplies_bfloat16(tmp_path / "missing")
