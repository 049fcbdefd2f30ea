"""What a stack leaves outside its home when everything is killed is removed by the next start, and nothing of anybody else's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from services.cli.stack.runtime import remember_segments, remove_leftovers, runtime_of
from services.cli.stack.segments import MAX_UNOWNED_SCANS, SHARED_MEMORY, Segment, SegmentWatch, mapped_by
from services.common.config.private_folder import home_prefix

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no /dev/shm")

KILLED = """
import os, signal, sys
from pathlib import Path
from services.cli.stack.runtime import runtime_of
with runtime_of(Path(sys.argv[1])) as runtime:
    (runtime.temporary_of("rollout-0") / "torch").mkdir(parents=True)
    (runtime.shared / "millrace-rollout-0").write_text("weights")
    print(runtime.temporary, runtime.shared, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    return made


def killed_stack(home: Path) -> list[Path]:
    """The directories that a killed supervisor has left."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(home)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    left = [Path(word) for word in done.stdout.split()]
    assert all(path.is_dir() for path in left)
    return left


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    """One that the resource tracker of this process does not see to."""
    from multiprocessing import resource_tracker

    made = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{made.name}", "shared_memory")
    yield made
    made.close()
    (SHARED_MEMORY / made.name).unlink(missing_ok=True)


def entry(segment: SharedMemory) -> Segment:
    return Segment(segment.name, (SHARED_MEMORY / segment.name).stat().st_ino)


def test_directories_are_private_short_and_gone_afterwards(home: Path) -> None:
    with runtime_of(home) as runtime:
        assert runtime.shared is not None
        for folder in (runtime.temporary, runtime.shared):
            assert folder.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(runtime.temporary_of("rollout-99") / ("x" * 36))) <= 107
    assert not runtime.temporary.exists()
    assert not runtime.shared.exists()
    assert list(home.iterdir()) == []


def test_a_long_tmpdir_is_not_taken(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    with runtime_of(home) as runtime:
        assert runtime.temporary.parent == Path("/tmp")  # noqa: S108


def test_what_a_killed_stack_left_goes_at_the_next_start(home: Path) -> None:
    left = killed_stack(home)
    with runtime_of(home) as runtime:
        assert not any(path.exists() for path in left)
        assert runtime.temporary.is_dir()


def test_two_homes_never_touch_each_others(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    left = killed_stack(other)
    assert remove_leftovers(home) == []
    with runtime_of(home):
        assert remove_leftovers(home) == []  # it is in use
    shutil.copytree(other, tmp_path / "copy")  # with its record
    assert remove_leftovers(tmp_path / "copy") == []
    assert all(path.is_dir() for path in left)
    assert sorted(remove_leftovers(other)) == sorted(map(str, left))


def test_a_moved_home_still_knows_its_own(home: Path) -> None:
    left = killed_stack(home)
    home = home.rename(home.with_name("moved"))
    assert sorted(remove_leftovers(home)) == sorted(map(str, left))


def test_a_link_or_a_directory_that_a_process_holds_stays(home: Path, tmp_path: Path) -> None:
    left = killed_stack(home)
    precious = tmp_path / "precious"
    precious.mkdir()
    shutil.rmtree(left[0])
    left[0].symlink_to(precious)
    held = os.open(left[1], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert remove_leftovers(home) == []
    os.close(held)
    assert precious.is_dir()
    left[0].unlink()
    shutil.rmtree(left[1])


def test_stages_of_servers_that_up_did_not_start_go_too_unless_they_run(home: Path) -> None:
    stages = [SHARED_MEMORY / f"{home_prefix(home)}{name}" for name in ("rollout-8", "rollout-9")]
    stages.append(home / "stage" / "rollout-7")
    for stage in stages:
        stage.mkdir(parents=True)
        (stage / "v1-0-0001.safetensors").write_text("weights")
    held = os.open(stages[1], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert sorted(remove_leftovers(home)) == sorted([str(stages[0]), str(stages[2])])
    os.close(held)
    assert remove_leftovers(home) == [str(stages[1])]


def test_a_broken_record_removes_nothing_and_keeps_nobody_from_starting(home: Path) -> None:
    (home / "runtime.json").write_text('{"home": 1, "folders": ["/"')
    with runtime_of(home):
        pass


def test_segments_that_a_record_names_are_removed_by_name_and_inode(home: Path, segment: SharedMemory) -> None:
    with runtime_of(home):
        remember_segments(home, (Segment(segment.name, entry(segment).inode + 1), Segment("millrace-none", 1)))
    assert entry(segment).is_there()
    with runtime_of(home):
        remember_segments(home, (entry(segment),))
    assert not (SHARED_MEMORY / segment.name).exists()


def test_a_segment_belongs_to_the_row_whose_processes_map_it_and_goes_with_it(segment: SharedMemory) -> None:
    me = psutil.Process()
    assert entry(segment).inode in mapped_by([me])
    watch = SegmentWatch()
    watch.scan(lambda: {"rollout-0": [me], "learner-0": []})
    assert watch.known == (entry(segment),)
    assert watch.end("learner-0", dict) == []
    assert watch.end("rollout-0", lambda: {"rollout-1": [me]}) == []  # somebody who lives uses it
    path = str(entry(segment).path)
    watch.scan(lambda: {"rollout-0": [me]})
    assert watch.end("rollout-0", dict) == [path]
    assert not watch.known


def test_semaphores_count_too() -> None:
    code = (
        "import multiprocessing, os; from services.cli.stack.segments import SegmentWatch; import psutil, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "watch = SegmentWatch(); watch.scan(lambda: {'rollout-0': [psutil.Process()]})\n"
        "print(*[segment.path for segment in watch.known])\n"
        "print(*watch.end('rollout-0', dict))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known, removed = done.stdout.splitlines()
    assert known.startswith(f"{SHARED_MEMORY}/sem.")
    assert known == removed


def test_other_peoples_segments_are_not_looked_into_for_ever(segment: SharedMemory) -> None:
    watch, asked = SegmentWatch(), list[int]()

    def families() -> dict[str, list[psutil.Process]]:
        asked.append(1)
        return {}

    for _ in range(MAX_UNOWNED_SCANS + 10):
        watch.scan(families)
    assert len(asked) == MAX_UNOWNED_SCANS
    assert watch.known == ()
    assert entry(segment).is_there()
