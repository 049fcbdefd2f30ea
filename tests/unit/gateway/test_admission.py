# ruff: noqa: ARG002
from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping

import pytest

from services.common.errors import ConfigError, DataError, ModelError
from services.common.spec import DataSourceSpec, JobSpec
from services.gateway.admission import MAX_THREADS, Admission
from services.gateway.errors import SpecRefused

SPEC = JobSpec.model_validate(
    {
        "model": {"path": "tiny"},
        "data": {"train": {"source": "a.jsonl"}, "eval": {"source": "b.jsonl"}},
        "reward": {"verifiers": {"mine": "gsm8k"}},
    }
)


class Recorded:
    """Checks that say yes, and remember what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def model(self, spec: JobSpec) -> None:
        self.asked.append(("model", spec.model.path))

    def data(self, source: DataSourceSpec, field: str, until: float) -> frozenset[str]:
        assert until > time.monotonic()
        self.asked.append(("data", field, source.source))
        return frozenset({f"of-{source.source}", "both"})

    def verifiers(self, overrides: Mapping[str, str]) -> None:
        self.asked.append(("verifiers", *overrides.values()))

    def verifier(self, data_source: str, overrides: Mapping[str, str]) -> None:
        assert overrides == SPEC.reward.verifiers
        self.asked.append(("verifier", data_source))


async def refusal(checks: Recorded, **options: float) -> list[tuple[str, str]]:
    with pytest.raises(SpecRefused) as caught:
        await Admission(checks, **options).admit(SPEC)
    return [(problem.field, problem.message) for problem in caught.value.problems]


async def test_model_data_and_every_data_source_are_checked_once() -> None:
    checks = Recorded()
    assert await Admission(checks).admit(SPEC) == ()
    assert sorted(checks.asked) == [
        ("data", "data.eval", "b.jsonl"),
        ("data", "data.train", "a.jsonl"),
        ("model", "tiny"),
        ("verifier", "both"),
        ("verifier", "of-a.jsonl"),
        ("verifier", "of-b.jsonl"),
        ("verifiers", "gsm8k"),
    ]


async def test_all_that_is_wrong_is_told_at_once_with_its_field() -> None:
    class Wrong(Recorded):
        def model(self, spec: JobSpec) -> None:
            raise ModelError("learner.tensor_parallel_size: 4 does not divide 9\nmodel.path: and more: of it")

        def data(self, source: DataSourceSpec, field: str, until: float) -> frozenset[str]:
            if field == "data.eval":
                raise DataError(f"{field}.source: /data/b.jsonl: row 3: `answer` is missing")
            return super().data(source, field, until)

        def verifier(self, data_source: str, overrides: Mapping[str, str]) -> None:
            raise ConfigError(f"no verifier is known for data_source {data_source!r}")

    assert await refusal(Wrong()) == [
        ("learner.tensor_parallel_size", "4 does not divide 9"),
        ("model.path", "and more: of it"),
        ("data.eval.source", "/data/b.jsonl: row 3: `answer` is missing"),
        ("data.train.data_source", "no verifier is known for data_source 'both'"),
        ("data.train.data_source", "no verifier is known for data_source 'of-a.jsonl'"),
    ]


async def test_an_unknown_verifier_is_told_once() -> None:
    class Unknown(Recorded):
        def verifiers(self, overrides: Mapping[str, str]) -> None:
            raise ConfigError("reward.verifiers['mine']: there is no verifier 'gsm9k'")

        def verifier(self, data_source: str, overrides: Mapping[str, str]) -> None:
            raise AssertionError("asked after the overrides were refused")

    assert await refusal(Unknown()) == [("reward.verifiers['mine']", "there is no verifier 'gsm9k'")]


async def test_a_file_that_cannot_be_read_is_the_fields_fault() -> None:
    class Unreadable(Recorded):
        def model(self, spec: JobSpec) -> None:
            raise PermissionError(13, "Permission denied")

    assert await refusal(Unreadable()) == [("model.path", "cannot be read: Permission denied")]


async def test_a_check_that_takes_too_long_is_left_to_the_learner_and_the_others_still_refuse() -> None:
    release = threading.Event()

    class Slow(Recorded):
        def data(self, source: DataSourceSpec, field: str, until: float) -> frozenset[str]:
            release.wait(20)
            return frozenset()

    try:
        started = time.monotonic()
        unchecked = await Admission(Slow(), deadline_s=1.2).admit(SPEC)
        assert time.monotonic() - started < 5
        assert unchecked == ("data.train.source", "data.eval.source")
    finally:
        release.set()


async def test_slow_checks_never_hold_more_than_their_number_of_threads() -> None:
    release = threading.Event()
    running = 0

    class Slow(Recorded):
        def model(self, spec: JobSpec) -> None:
            nonlocal running
            running += 1
            release.wait(20)

    admission = Admission(Slow(), deadline_s=0.3)
    try:
        answers = await asyncio.gather(*(admission.admit(SPEC) for _ in range(3 * MAX_THREADS)))
        assert all("model.path" in unchecked for unchecked in answers)
        assert running == MAX_THREADS
    finally:
        release.set()


async def test_a_fault_of_a_check_is_not_taken_for_bad_input() -> None:
    class Broken(Recorded):
        def model(self, spec: JobSpec) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Admission(Broken()).admit(SPEC)
