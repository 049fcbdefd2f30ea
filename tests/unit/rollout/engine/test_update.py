"""The change of weights: nothing stands still while bytes are fetched or verified, and a pause is a lease. The engine is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.errors import WeightSyncError
from services.common.weight_sync.staging import StagedWeights
from services.common.weights.snapshot import PolicyVersion, digest_of
from services.rollout.engine import update
from services.rollout.engine.model_tensors import Shapes
from services.rollout.engine.update import EngineError, VersionLabel, WeightSwitch

SHAPES: Shapes = {"w": (2, 3)}


class Scripted:
    """An engine that notes what it is told; `faults` are raised by the loads in order, and `slow_s` is how long one takes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: list[Exception | None] = []
        self.slow_s = 0.0
        self.outputs_queue: asyncio.Queue[None] = asyncio.Queue()

    @property
    def engine_core(self) -> Scripted:
        return self

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        assert not clear_cache
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert args[0].endswith(".safetensors")
        self.calls.append(method.removeprefix("millrace_").removesuffix("_weights"))
        await asyncio.sleep(self.slow_s)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return [(0.5, 3, 3)]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.llm, self.label, self._folder = Scripted(), VersionLabel(), folder
        self.switch = WeightSwitch(self.llm, self.label, SHAPES, self.note)
        self.noted: list[tuple[list[str], PolicyVersion | None]] = []

    def note(self) -> None:
        self.noted.append((list(self.llm.calls), self.label.version))

    def staged(self, n: int) -> StagedWeights:
        path, values = self._folder / f"v1-{n}.safetensors", np.zeros((2, 3), np.float32)
        save_file({"w": values}, path)
        return StagedWeights(1, n, path, {"w": digest_of(values.reshape(-1).view(np.uint8)).hex()}, 24, 0.0, 24)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_the_label_comes_after_the_installed_weights_and_before_the_next_token(bench: Bench) -> None:
    done = await bench.switch.change(bench.staged(1))
    assert bench.llm.calls == ["pause", "apply", "resume"]
    assert bench.label.version == PolicyVersion(1, 1) == done.version
    await bench.switch.change(bench.staged(2))
    assert bench.noted[1] == (["pause", "apply", "resume", "pause"], PolicyVersion(1, 1)), (
        "paused, of the version before"
    )


async def test_the_version_ends_when_all_outputs_before_the_pause_are_taken(bench: Bench) -> None:
    queue, taken = bench.llm.outputs_queue, []

    async def handler() -> None:
        while True:
            await queue.get()
            for _ in range(8):  # in parts
                await asyncio.sleep(0)
            taken.append(len(bench.noted))

    for _ in range(3):
        queue.put_nowait(None)
    handling = asyncio.create_task(handler())
    await bench.switch.change(bench.staged(1))
    handling.cancel()
    assert taken == [0, 0, 0], "before the pause was noted"


async def test_what_is_found_before_the_pause_pauses_nobody(bench: Bench) -> None:
    staged = bench.staged(1)
    save_file({"w": np.ones((2, 3), np.float32)}, staged.path)
    with pytest.raises(WeightSyncError, match=r"version .*1.*: w: the bytes do not match their digest"):
        await bench.switch.change(staged)
    assert bench.llm.calls == []


async def test_installed_weights_that_do_not_verify_are_replaced_by_the_ones_before(bench: Bench) -> None:
    await bench.switch.change(bench.staged(1))
    bench.llm.calls.clear()
    bench.llm.faults = [WeightSyncError("w: what the engine holds is not what the file says"), None]
    with pytest.raises(WeightSyncError, match="the weights before are back"):
        await bench.switch.change(bench.staged(2))
    assert bench.llm.calls == ["pause", "apply", "apply", "resume"]
    assert bench.label.version == PolicyVersion(1, 1)


async def test_weights_that_nobody_knows_lose_the_label_and_stay_paused(bench: Bench) -> None:
    await bench.switch.change(bench.staged(1))
    bench.llm.calls.clear()
    bench.llm.faults = [RuntimeError("broke off"), RuntimeError("again")]
    with pytest.raises(EngineError, match="half applied"):
        await bench.switch.change(bench.staged(2))
    assert "resume" not in bench.llm.calls
    assert bench.label.version is None


async def test_a_pause_beyond_its_lease_fences_the_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "PAUSE_LEASE_S", 0.2)
    await bench.switch.change(bench.staged(1))
    bench.llm.slow_s = 60.0
    with pytest.raises(EngineError, match=r"paused for longer than the lease of 0\.2 s"):
        await bench.switch.change(bench.staged(2))
    assert bench.label.version is None
    assert bench.llm.calls[-1] == "apply", "it never resumed"


async def test_a_hold_lasts_until_it_is_released_and_a_second_one_changes_nothing(bench: Bench) -> None:
    await bench.switch.hold()
    await bench.switch.hold()
    assert bench.llm.calls == ["pause"]
    assert bench.switch.changing
    await bench.switch.release()
    await bench.switch.release()
    assert bench.llm.calls == ["pause", "resume"]
    assert not bench.switch.changing


async def test_new_weights_end_a_hold_before_the_next_token(bench: Bench) -> None:
    await bench.switch.change(bench.staged(1))
    bench.llm.calls.clear()
    await bench.switch.hold()
    await bench.switch.change(bench.staged(2))
    assert bench.llm.calls == ["pause", "pause", "apply", "resume"]
    assert not bench.switch.holding
    await bench.switch.release()
    assert bench.llm.calls[-1] == "resume"
    assert bench.llm.calls.count("resume") == 1


async def test_weights_that_are_refused_leave_a_hold_as_it_is(bench: Bench) -> None:
    await bench.switch.change(bench.staged(1))
    await bench.switch.hold()
    with pytest.raises(WeightSyncError):
        await bench.switch.change(bench.staged(1))
    assert bench.switch.holding
