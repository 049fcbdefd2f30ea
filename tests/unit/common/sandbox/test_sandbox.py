"""The sandbox: whatever a child does, its caller gets a value or an error in time, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgpack
import psutil
import pytest
import pytest_asyncio

from services.common.errors import ChildDied, ChildLost, ChildTimeout, DataError, SandboxError
from services.common.sandbox.limits import CPU_MARGIN_S, LOG_BYTES, Limits
from services.common.sandbox.pool import Sandbox
from services.common.service.process_tree import is_running

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEEDS = "tests.unit.common.sandbox.deeds"
LIMITS = Limits(wall_s=10.0, memory_mib=256)
QUICK = Limits(wall_s=0.5, memory_mib=256)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(prepare=[f"{DEEDS}:prepare"]) as started:
        await started.start()
        yield started


async def vanished(pid: int, within_s: float = 3.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not is_running(pid):
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_call_gives_its_value(sandbox: Sandbox) -> None:
    assert await sandbox.call(f"{DEEDS}:add", 2, 3, limits=LIMITS) == 5


@pytest.mark.parametrize("value", [None, True, -7, 0.5, "täxt", b"\x00\xff", [1, [2]], {"a": {"b": []}}, "\ud800"])
async def test_values_come_back_as_they_went(sandbox: Sandbox, value: object) -> None:
    assert await sandbox.call(f"{DEEDS}:echo", value, limits=LIMITS) == value


async def test_children_are_forked_from_what_was_prepared_once(sandbox: Sandbox) -> None:
    assert await sandbox.call(f"{DEEDS}:prepared", limits=LIMITS) == ["ready"]


async def test_each_thread_of_a_child_has_the_wall_clock_limit_as_processor_time(sandbox: Sandbox) -> None:
    for threads in (1, 3):
        limits = Limits(wall_s=10.0, memory_mib=256, threads=threads)
        soft, _ = await sandbox.call("resource:getrlimit", resource.RLIMIT_CPU, limits=limits)
        assert 10 * threads <= soft - CPU_MARGIN_S < 10 * threads + 5


@pytest.mark.parametrize("deed", ["spin", "deaf"])
async def test_a_call_that_does_not_end_is_ended_at_its_limit(sandbox: Sandbox, deed: str) -> None:
    began = time.monotonic()
    with pytest.raises(ChildTimeout, match=r"took longer than 0\.5 s"):
        await sandbox.call(f"{DEEDS}:{deed}", limits=QUICK)
    assert time.monotonic() - began < 2.0


async def test_memory_beyond_the_limit_is_refused_in_words(sandbox: Sandbox) -> None:
    assert await sandbox.call(f"{DEEDS}:large", 128, limits=LIMITS) == 128 << 20
    with pytest.raises(ChildDied, match="needed more than 256 MiB"):
        await sandbox.call(f"{DEEDS}:large", 512, limits=LIMITS)


async def test_an_answer_beyond_the_limit_is_not_taken_in(sandbox: Sandbox) -> None:
    with pytest.raises(ChildDied, match="answered more than 1048576 bytes"):
        await sandbox.call(f"{DEEDS}:answer", 8, limits=Limits(wall_s=10.0, reply_bytes=1 << 20))


@pytest.mark.parametrize("deed", ["nested", "unknown"])
async def test_an_answer_that_cannot_be_sent_is_an_error(sandbox: Sandbox, deed: str) -> None:
    with pytest.raises(SandboxError):
        await sandbox.call(f"{DEEDS}:{deed}", limits=LIMITS)


async def test_errors_of_ours_are_raised_again_as_they_are(sandbox: Sandbox) -> None:
    with pytest.raises(DataError, match=r"^data\.train: row 3: no$"):
        await sandbox.call(f"{DEEDS}:wrong_data", limits=LIMITS)


async def test_other_errors_are_named(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"^ZeroDivisionError: division by zero$"):
        await sandbox.call(f"{DEEDS}:zero", limits=LIMITS)
    with pytest.raises(SandboxError, match=r"^Stranger: far away$"):
        await sandbox.call(f"{DEEDS}:stranger", limits=LIMITS)


async def test_a_child_that_ends_itself_is_told_from_one_that_was_ended(sandbox: Sandbox) -> None:
    with pytest.raises(ChildDied, match="ended its process"):
        await sandbox.call(f"{DEEDS}:leave", 3, limits=LIMITS)
    with pytest.raises(ChildDied, match="ended its process by SIGSEGV"):
        await sandbox.call(f"{DEEDS}:die", int(signal.SIGSEGV), limits=LIMITS)
    with pytest.raises(ChildLost):
        await sandbox.call(f"{DEEDS}:die", int(signal.SIGKILL), limits=LIMITS)


async def test_a_child_whose_end_takes_time_is_told_by_its_signal(sandbox: Sandbox) -> None:
    with pytest.raises(ChildLost):
        await sandbox.call(f"{DEEDS}:die_slowly", int(signal.SIGKILL), limits=LIMITS)
    with pytest.raises(ChildDied, match="by SIGSEGV"):
        await sandbox.call(f"{DEEDS}:die_slowly", int(signal.SIGSEGV), limits=LIMITS)


async def test_a_call_whose_child_was_killed_from_outside_is_made_again(sandbox: Sandbox) -> None:
    before = set(psutil.Process().children(recursive=True))
    call = asyncio.create_task(sandbox.call(f"{DEEDS}:sleep", 1.0, limits=LIMITS))
    while not (born := set(psutil.Process().children(recursive=True)) - before):
        await asyncio.sleep(0.02)
    [first] = born
    first.kill()
    assert await call != first.pid


async def test_what_a_child_started_ends_with_it(sandbox: Sandbox) -> None:
    assert await vanished(await sandbox.call(f"{DEEDS}:breed", limits=LIMITS))


async def test_a_cancelled_call_leaves_no_child_and_the_next_one_has_its_own_answer(sandbox: Sandbox) -> None:
    before = set(psutil.Process().children(recursive=True))
    for pause_s in (0.0, 0.0, 0.001, 0.01, 0.2):
        call = asyncio.create_task(sandbox.call(f"{DEEDS}:sleep", 30.0, limits=LIMITS))
        await asyncio.sleep(pause_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await sandbox.call(f"{DEEDS}:add", 1, 1, limits=LIMITS) == 2
    for child in set(psutil.Process().children(recursive=True)) - before:
        assert await vanished(child.pid)


async def test_a_child_keeps_what_it_made_and_answers_in_turn(sandbox: Sandbox) -> None:
    child = await sandbox.spawn(f"{DEEDS}:counter", 10, limits=LIMITS)
    try:
        assert await asyncio.gather(*(child.request("add", 1) for _ in range(5))) == [11, 12, 13, 14, 15]
        with pytest.raises(DataError, match="not this one"):
            await child.request("fail")
        assert await child.request("add", 1) == 16
        pid = await child.request("pid")
    finally:
        await child.close()
    assert await vanished(pid)


async def test_a_request_over_its_limit_ends_the_child(sandbox: Sandbox) -> None:
    child = await sandbox.spawn(f"{DEEDS}:counter", 0, limits=LIMITS)
    pid = await child.request("pid")
    with pytest.raises(ChildTimeout):
        await child.request("sleep", 30.0, wall_s=0.3)
    assert not child.alive
    assert await vanished(pid)
    with pytest.raises(ChildLost):
        await child.request("add", 1)


@pytest.mark.parametrize("extra", [["value", 7], [0, "value", 7], [True, "value", 7], 7, []])
async def test_an_answer_that_nobody_asked_for_is_never_taken_for_another_and_ends_the_child(
    sandbox: Sandbox, extra: object
) -> None:
    child = await sandbox.spawn(f"{DEEDS}:counter", 0, limits=LIMITS)
    pid = await child.request("pid")
    with pytest.raises(ChildDied, match="no reply"):
        await child.request("add_and_say", 1, msgpack.packb(extra))
    assert not child.alive
    assert await vanished(pid)


async def test_a_second_answer_is_never_that_to_the_next_request(sandbox: Sandbox) -> None:
    child = await sandbox.spawn(f"{DEEDS}:counter", 0, limits=LIMITS)
    first, second = (msgpack.packb([1, "value", value]) for value in (7, 8))
    assert await child.request("add_and_say", 1, first + second) == 7  # its own words, as those of its code are
    with pytest.raises(ChildDied, match="no reply"):
        await child.request("add", 1)
    assert not child.alive


async def test_a_stopped_child_is_lost_not_late(sandbox: Sandbox) -> None:
    child = await sandbox.spawn(f"{DEEDS}:counter", 0, limits=LIMITS)
    os.kill(await child.request("pid"), signal.SIGSTOP)
    with pytest.raises(ChildLost, match="a signal stopped it"):
        await child.request("add", 1, wall_s=0.5)


async def test_a_child_that_closes_its_socket_and_lives_is_not_waited_for_beyond_its_limit(sandbox: Sandbox) -> None:
    child = await sandbox.spawn(f"{DEEDS}:counter", 0, limits=LIMITS)
    began = time.monotonic()
    with pytest.raises(ChildDied, match="ended its process"):
        await child.request("close_and_sleep", 0.4, wall_s=0.5)
    assert time.monotonic() - began < 1.0  # not 1.4, with the time that an end may take


async def test_a_child_whose_making_fails_is_not_left(sandbox: Sandbox) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(SandboxError, match="TypeError"):
        await sandbox.spawn(f"{DEEDS}:counter", limits=LIMITS)
    for child in set(psutil.Process().children(recursive=True)) - before:
        assert await vanished(child.pid)


async def test_another_forkserver_takes_over_from_one_that_was_killed() -> None:
    async with Sandbox() as sandbox:
        pid = await sandbox.call(f"{DEEDS}:sleep", 0.0, limits=LIMITS)
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGKILL)
        assert await sandbox.call(f"{DEEDS}:sleep", 0.0, limits=LIMITS) != pid


async def test_a_forkserver_that_cannot_be_prepared_says_so() -> None:
    async with Sandbox(prepare=[f"{DEEDS}:zero"]) as sandbox:
        with pytest.raises(SandboxError, match="does not start"):
            await sandbox.call(f"{DEEDS}:add", 1, 1, limits=LIMITS)


async def test_children_know_no_setting_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "canary")
    monkeypatch.setenv("REDIS_URL", "redis://user:canary@host")
    async with Sandbox() as sandbox:
        found = await sandbox.call(f"{DEEDS}:environment", limits=LIMITS)
    assert "canary" not in str(found)


async def test_a_child_writes_no_large_file(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError):
        await sandbox.call(f"{DEEDS}:write", str(tmp_path / "bomb"), 128, limits=LIMITS)
    assert (tmp_path / "bomb").stat().st_size <= 64 << 20


async def test_what_a_child_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    async with Sandbox() as sandbox:
        await sandbox.call(f"{DEEDS}:talk", limits=LIMITS)
    assert "printed" not in "".join(capfd.readouterr())


async def test_a_child_writes_log_lines_up_to_a_bound(capfd: pytest.CaptureFixture[str]) -> None:
    async with Sandbox() as sandbox:
        await sandbox.call(f"{DEEDS}:log_lines", 3, 100, limits=LIMITS)
        assert capfd.readouterr().err.count("logged") == 3
        await sandbox.call(f"{DEEDS}:log_lines", 8, 1 << 18, limits=LIMITS)
    said = capfd.readouterr().err
    assert len(said) < LOG_BYTES + 1000
    assert said.count("logged") == 3
    assert said.endswith("left out)\n")
