"""The pool: a bomb costs its own verdict and its limit, never anything of the others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.common.errors import VerifierError
from services.common.sandbox.limits import NICENESS
from services.common.service.process_tree import family, is_running
from services.common.streams.types import Verdict, VerdictStatus
from services.reward.pool.messages import MAX_GROUND_TRUTH_CHARS, MAX_RESPONSE_CHARS, Check
from services.reward.pool.pool import Pool
from services.reward.pool.processes import MAX_LEFTOVER_PROCESSES, SLOW_CHECK_S

PoolMaker = Callable[..., AbstractAsyncContextManager[Pool]]
CheckMaker = Callable[..., Check]

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 1.0
MARGIN_S = 0.5
"""Beyond the limit, for the kill and the next worker."""

BOMBS = {
    "tower in a box": ("math", r"so it is \boxed{9^{9^{9^{9}}}}"),
    "tower in plain text": ("math", "the answer is 9**9**9**9"),
    "factorial": ("math", r"$1000000000!$"),
    "binomial": ("math", r"$\binom{1000000000}{500000000}$"),
    "deep parentheses": ("math", "$" + "(" * 3000 + "1" + ")" * 3000 + "$"),
    "deep braces": ("math", "$" + "{" * 15_000 + "$"),
    "endless regex": ("odd_endless_regex", "a" * 60),
    "sleep": ("odd_sleep", "60"),
}


def summary(verdict: Verdict) -> tuple[str, float | None]:
    return verdict.status, verdict.reward


@pytest.mark.parametrize(("verifier", "response"), BOMBS.values(), ids=BOMBS.keys())
async def test_a_bomb_is_a_wrong_answer_by_its_timeout_and_the_next_check_goes_on(
    pool: Pool, check: CheckMaker, verifier: str, response: str
) -> None:
    began = time.monotonic()
    bomb, good = await asyncio.gather(
        pool.judge([check(verifier, response, timeout_s=LIMIT_S)]), pool.judge([check("gsm8k", "#### 1")])
    )
    waited_s = time.monotonic() - began
    assert summary(bomb[0]) == (VerdictStatus.TIMEOUT, 0.0)
    assert bomb[0].accuracy == 0.0
    assert bomb[0].detail == "no verdict within 1 s"
    assert summary(good[0]) == (VerdictStatus.SCORED, 1.0)
    assert waited_s < LIMIT_S + MARGIN_S


async def test_a_bomb_within_a_batch_costs_only_its_own_verdict(pool: Pool, check: CheckMaker) -> None:
    checks = [check("gsm8k", f"#### {n}", str(n)) for n in range(16)]
    checks[5] = check("odd_sleep", "60", timeout_s=0.5)
    verdicts = await pool.judge(checks)
    assert [summary(v) for v in verdicts if v.verifier == "gsm8k"] == [(VerdictStatus.SCORED, 1.0)] * 15
    assert summary(verdicts[5]) == (VerdictStatus.TIMEOUT, 0.0)


async def test_a_bomb_before_checks_that_no_socket_holds_costs_its_limit_and_not_theirs(
    pool: Pool, check: CheckMaker
) -> None:
    large = " " * MAX_RESPONSE_CHARS
    checks = [check("odd_sleep", "60", timeout_s=LIMIT_S), *(check("odd_always_right", large) for _ in range(15))]
    began = time.monotonic()
    verdicts = await pool.judge(checks)
    assert time.monotonic() - began < LIMIT_S + 10 * MARGIN_S
    assert [verdict.status for verdict in verdicts] == [VerdictStatus.TIMEOUT, *[VerdictStatus.SCORED] * 15]


async def test_bombs_in_one_slot_do_not_hold_up_the_other(pool_of: PoolMaker, check: CheckMaker) -> None:
    async with pool_of(2) as pool:
        bombs = [asyncio.create_task(pool.judge([check("odd_sleep", "60", timeout_s=4.0)]))]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        verdicts = await pool.judge([check("gsm8k", "#### 1")] * 50)
        assert time.monotonic() - began < 2.0
        assert {summary(verdict) for verdict in verdicts} == {(VerdictStatus.SCORED, 1.0)}
        for bomb in bombs:
            bomb.cancel()


async def test_the_limit_is_of_each_check_and_not_of_their_batch(pool: Pool, check: CheckMaker) -> None:
    verdicts = await pool.judge([check("odd_sleep", "0.2", timeout_s=0.6)] * 8)
    assert {verdict.status for verdict in verdicts} == {VerdictStatus.SCORED}


async def test_verdicts_come_in_the_order_of_the_checks(pool_of: PoolMaker, check: CheckMaker) -> None:
    async with pool_of(2) as pool:
        verdicts = await pool.judge([check("gsm8k", f"#### {n}", "7") for n in range(60)])
        assert await pool.judge([]) == []
    assert [verdict.reward for verdict in verdicts] == [1.0 if n == 7 else 0.0 for n in range(60)]


@pytest.mark.parametrize(
    ("verifier", "response", "reward", "accuracy"),
    [
        ("odd_truth", "42", 1.0, 1.0),
        ("odd_truth", "41", 0.0, 0.0),
        ("odd_number", "0.25", 0.25, 0.25),
        ("odd_number", "-1", -1.0, 0.0),
        ("odd_number", "3", 3.0, 1.0),
    ],
)
async def test_a_number_is_the_reward_and_within_0_and_1_the_accuracy(
    pool: Pool, check: CheckMaker, verifier: str, response: str, reward: float, accuracy: float
) -> None:
    (verdict,) = await pool.judge([check(verifier, response, "42")])
    assert (verdict.status, verdict.reward, verdict.accuracy) == (VerdictStatus.SCORED, reward, accuracy)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("odd_raises", "ValueError: cannot cope with 'odd'"),
        ("odd_dies", "its process died"),
        ("odd_exits", "its process died"),
        ("odd_not_a_score", "VerifierError: a verifier returns a Score, a finite number or a truth value, not 'right'"),
        ("odd_nan", "VerifierError: reward must be finite, not nan"),
        ("odd_declares_nonsense", "VerifierError: lowest_reward must be a finite number, not 'low'"),
        ("odd_missing", "VerifierError: verifier 'odd_missing' cannot be loaded"),
        ("odd_broken", "VerifierError: verifier 'odd_broken' cannot be loaded: No module named 'no_such_package'"),
        ("nowhere", "VerifierError: there is no verifier 'nowhere' on this server"),
    ],
)
async def test_a_verifier_that_fails_gives_no_reward(pool: Pool, check: CheckMaker, verifier: str, reason: str) -> None:
    failed, good = await pool.judge([check(verifier, "odd"), check("gsm8k", "#### 1")])
    assert summary(failed) == (VerdictStatus.FAILED, None)
    assert reason in failed.detail
    assert summary(good) == (VerdictStatus.SCORED, 1.0)


async def test_a_check_beyond_a_limit_has_the_lowest_reward_that_its_verifier_declares(
    pool: Pool, check: CheckMaker
) -> None:
    slow, hungry = await pool.judge([
        check("odd_strict", "sleep", timeout_s=0.5), check("odd_strict", "eat"),
    ])  # fmt: skip
    for verdict in (slow, hungry):
        assert (verdict.status, verdict.reward, verdict.accuracy) == (VerdictStatus.TIMEOUT, -2.5, 0.0)


async def test_a_verifier_that_is_not_loaded_in_time_has_broken_and_no_answer_is_wrong_for_it(
    pool: Pool, check: CheckMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.pool.processes.LOAD_TIMEOUT_S", 0.3)
    slow, good = await pool.judge([check("odd_slow_import"), check("gsm8k", "#### 1")])
    assert summary(slow) == (VerdictStatus.FAILED, None)
    assert slow.detail == "the verifier was not loaded within 0.3 s"
    assert summary(good) == (VerdictStatus.SCORED, 1.0)


async def test_a_check_that_needs_too_much_memory_is_over_its_limit_and_a_wrong_answer(
    pool: Pool, check: CheckMaker
) -> None:
    hungry, good = await pool.judge([check("odd_eats_memory"), check("gsm8k", "#### 1")])
    assert summary(hungry) == (VerdictStatus.TIMEOUT, 0.0)
    assert hungry.detail == "MemoryError: beyond the limit of this check"
    assert summary(good) == (VerdictStatus.SCORED, 1.0)


async def test_each_check_has_the_memory_that_its_job_allows(pool: Pool, check: CheckMaker) -> None:
    takes = check("odd_takes_memory", "700", timeout_s=30.0)
    small, large = await pool.judge([replace(takes, memory_mib=512), replace(takes, memory_mib=2048)])
    assert (small.status, large.status) == (VerdictStatus.TIMEOUT, VerdictStatus.SCORED)


async def test_a_job_says_how_much_of_a_response_is_judged(pool: Pool, check: CheckMaker) -> None:
    [verdict] = await pool.judge([replace(check("odd_always_right", "x" * 5000), max_chars=1024)])
    assert verdict.detail.startswith("1024 characters")


async def test_a_stopped_worker_costs_nobody_a_verdict(pool_of: PoolMaker, check: CheckMaker) -> None:
    async with pool_of(1) as pool:
        [before] = await pool.judge([check("odd_process")])
        os.kill(int(before.detail), signal.SIGSTOP)
        [after] = await pool.judge([check("odd_process", timeout_s=0.5)])
        assert summary(after) == (VerdictStatus.SCORED, 1.0)
        assert after.detail != before.detail
        await vanished([int(before.detail)])


@pytest.mark.slow
async def test_a_stopped_forkserver_is_noticed_killed_and_replaced(pool_of: PoolMaker, check: CheckMaker) -> None:
    async with pool_of(1) as pool:
        [before] = await pool.judge([check("odd_process")])
        forkserver = psutil.Process(int(before.detail)).ppid()
        os.kill(forkserver, signal.SIGSTOP)
        await vanished([forkserver, int(before.detail)], within_s=10.0)
        [after] = await pool.judge([check("odd_process")])
        assert summary(after) == (VerdictStatus.SCORED, 1.0)


async def test_a_verifier_that_fails_once_is_tried_again(pool: Pool, check: CheckMaker) -> None:
    [verdict] = await pool.judge([check("odd_fails_once")])
    assert summary(verdict) == (VerdictStatus.SCORED, 1.0)


async def test_an_installed_verifier_gets_the_row_and_cannot_take_a_built_in_name(
    pool: Pool, check: CheckMaker
) -> None:
    plugin, built_in = await pool.judge([check("odd_always_right", "abc", "42"), check("gsm8k", "#### 1")])
    assert plugin.detail == "3 characters, 42, somewhere"
    assert plugin.verifier == "odd_always_right"
    assert summary(built_in) == (VerdictStatus.SCORED, 1.0)


async def test_a_huge_response_is_judged_by_its_end(pool: Pool, check: CheckMaker) -> None:
    judged, right = await pool.judge([
        check("odd_always_right", "x" * 3_000_000), check("gsm8k", "7 " * 2_000_000 + "#### 1"),
    ])  # fmt: skip
    assert judged.detail.startswith(f"{MAX_RESPONSE_CHARS} characters")
    assert summary(right) == (VerdictStatus.SCORED, 1.0)


async def test_what_cannot_be_judged_at_all_fails_without_a_process(pool: Pool, check: CheckMaker) -> None:
    verdicts = await pool.judge([
        check("gsm8k", "1", "1" * (MAX_GROUND_TRUTH_CHARS + 1)), check("gsm8k", "1", "1", value=object()),
    ])  # fmt: skip
    assert [verdict.status for verdict in verdicts] == [VerdictStatus.FAILED] * 2
    assert "exceeds 32768" in verdicts[0].detail
    assert "extra_info cannot be packed" in verdicts[1].detail


@pytest.mark.slow
async def test_workers_are_replaced_after_their_share_of_checks(pool_of: PoolMaker, check: CheckMaker) -> None:
    async with pool_of(1, recycle_after=10) as pool:
        verdicts = [verdict for _ in range(4) for verdict in await pool.judge([check("odd_process")] * 10)]
    assert len({verdict.detail for verdict in verdicts}) == 4


async def test_a_long_check_makes_way_for_others_and_its_worker_is_replaced(
    pool_of: PoolMaker, check: CheckMaker
) -> None:
    async with pool_of(1) as pool:
        [before] = await pool.judge([check("odd_process")])
        worker = psutil.Process(int(before.detail))
        niceness = worker.nice()
        long = asyncio.create_task(pool.judge([check("odd_sleep", "1.5", timeout_s=30.0)]))
        await asyncio.sleep(SLOW_CHECK_S / 2)
        assert worker.nice() == niceness
        await asyncio.sleep(SLOW_CHECK_S)
        assert worker.nice() == min(19, niceness + NICENESS)
        [verdict] = await long
        [after] = await pool.judge([check("odd_process")])
    assert verdict.status is VerdictStatus.SCORED
    assert int(after.detail) != worker.pid


async def test_the_pool_goes_on_after_its_forkserver_was_killed(pool_of: PoolMaker, check: CheckMaker) -> None:
    async with pool_of(1) as pool:
        [before] = await pool.judge([check("odd_process")])
        forkserver = psutil.Process(int(before.detail)).ppid()
        os.kill(forkserver, signal.SIGKILL)
        await vanished([forkserver, int(before.detail)])
        [after] = await pool.judge([check("odd_process")])
        assert summary(after) == (VerdictStatus.SCORED, 1.0)
        assert psutil.Process(int(after.detail)).ppid() != forkserver


async def test_a_check_that_used_up_its_processor_time_is_a_wrong_answer_and_no_failure(
    pool: Pool, check: CheckMaker
) -> None:
    [verdict, good] = await pool.judge([check("odd_computes_in_threads"), check("gsm8k", "#### 1")])
    assert summary(verdict) == (VerdictStatus.TIMEOUT, 0.0)
    assert summary(good) == (VerdictStatus.SCORED, 1.0)


async def test_checks_that_hang_keep_no_other_pool_waiting(pool: Pool, check: CheckMaker) -> None:
    async with pool.sibling() as other:
        [verdict] = await other.judge([check("odd_process")])
        hanging = asyncio.create_task(other.judge([check("odd_sleep", "60", timeout_s=60.0)] * 20))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        verdicts = await pool.judge([check("gsm8k", "#### 1")] * 20)
        assert time.monotonic() - began < 5.0
    with pytest.raises(VerifierError, match="closed"):
        await hanging
    assert [summary(v) for v in verdicts] == [(VerdictStatus.SCORED, 1.0)] * 20
    assert pool.fault() is None
    assert summary((await pool.judge([check("gsm8k", "#### 1")]))[0]) == (VerdictStatus.SCORED, 1.0)
    await vanished([int(verdict.detail)])


async def test_secrets_of_the_service_do_not_reach_a_verifier(
    pool_of: PoolMaker, check: CheckMaker, monkeypatch: pytest.MonkeyPatch, plugins: dict[str, str]
) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "secret")
    monkeypatch.setenv("REDIS_URL", "redis://:secret@host")
    assert "MILLRACE_TOKEN" not in plugins
    async with pool_of(1) as pool:
        [verdict] = await pool.judge([check("odd_shows_environment")])
    assert verdict.detail == ""


async def test_a_kill_takes_along_what_the_verifier_started(pool: Pool, check: CheckMaker, tmp_path: Path) -> None:
    note = tmp_path / "child"
    [verdict] = await pool.judge([check("odd_leaves_a_child", str(note), timeout_s=1.0)])
    assert verdict.status is VerdictStatus.TIMEOUT
    await vanished([int(note.read_text())])


async def test_a_kill_finds_what_hides_in_a_session_of_its_own(pool: Pool, check: CheckMaker, tmp_path: Path) -> None:
    note = tmp_path / "strangers"
    [verdict] = await pool.judge([check("odd_leaves_strangers", str(note), "60", timeout_s=1.0)])
    assert verdict.status is VerdictStatus.TIMEOUT
    await vanished([int(pid) for pid in note.read_text().split()])


async def test_a_worker_whose_checks_leave_processes_behind_is_replaced_and_they_end(
    pool_of: PoolMaker, check: CheckMaker, tmp_path: Path
) -> None:
    note = tmp_path / "strangers"
    async with pool_of(1) as pool:
        for _ in range(3 * MAX_LEFTOVER_PROCESSES):
            [verdict] = await pool.judge([check("odd_leaves_strangers", str(note), "0")])
            assert verdict.status is VerdictStatus.SCORED
        left = [pid for pid in map(int, note.read_text().split()) if psutil.pid_exists(pid)]
        assert len(left) <= 2 * MAX_LEFTOVER_PROCESSES
    await vanished(left)


async def test_a_closed_pool_leaves_no_process_and_keeps_nobody_waiting(pool_of: PoolMaker, check: CheckMaker) -> None:
    before = set(psutil.Process().children())
    async with pool_of(2) as pool:
        [forkserver] = set(psutil.Process().children()) - before
        await pool.judge([check("gsm8k", "#### 1")] * 40)
        async with asyncio.timeout(10):  # on a busy machine a check may take long enough for its worker to be replaced
            while len(ours := family(forkserver.pid)) != 3:  # itself and two workers
                await asyncio.sleep(0.05)
        waiting = asyncio.create_task(pool.judge([check("odd_sleep", "60", timeout_s=60.0)] * 3))
        await asyncio.sleep(0.2)
    with pytest.raises(VerifierError, match="closed"):
        await asyncio.wait_for(waiting, 2.0)
    await vanished([process.pid for process in ours])


async def test_workers_end_with_a_service_that_is_killed(plugins: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(
        "import asyncio, os\n"
        "from services.reward.pool.messages import Check\n"
        "from services.reward.pool.pool import Pool\n"
        "async def main():\n"
        "    async with Pool(1) as pool:\n"
        "        [v] = await pool.judge([Check('odd_process', '', '', '', {}, 5.0)])\n"
        "        print(v.detail, flush=True)\n"
        "        await pool.judge([Check('odd_sleep', '60', '', '', {}, 60.0)])\n"
        "asyncio.run(main())\n"
    )
    service = await asyncio.create_subprocess_exec(sys.executable, script, stdout=subprocess.PIPE, env=plugins)
    assert service.stdout is not None
    worker = int(await service.stdout.readline())
    forkserver = psutil.Process(worker).ppid()
    await asyncio.sleep(0.3)
    service.kill()
    await service.wait()
    await vanished([worker, forkserver])


async def vanished(pids: list[int], within_s: float = 5.0) -> None:
    """Waits until none of the processes runs any more (a zombie does not)."""
    deadline = time.monotonic() + within_s
    while alive := list(filter(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {alive}"
        await asyncio.sleep(0.05)


async def test_the_forkserver_has_one_thread_so_that_it_may_fork(pool: Pool, check: CheckMaker) -> None:
    [verdict] = await pool.judge([check("odd_process")])
    worker = psutil.Process(int(verdict.detail))
    assert psutil.Process(worker.ppid()).num_threads() == 1
    assert worker.rlimit(psutil.RLIMIT_AS)[0] == 2 * 1024**3
    assert 0 < worker.rlimit(psutil.RLIMIT_CPU)[0] < 60
