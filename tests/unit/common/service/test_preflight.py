from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.service.preflight import (
    RedisUnavailable,
    require_disk_space,
    require_memory,
    require_platform,
    require_redis,
)


def test_a_volume_with_room_is_taken_and_its_folder_made(tmp_path: Path) -> None:
    require_disk_space(tmp_path / "home" / "jobs", 0.0)
    assert list((tmp_path / "home" / "jobs").iterdir()) == []


def test_a_volume_without_room_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^MILLRACE_HOME: the volume of .* has [\d.]+ GiB free, and MILLRACE_MIN_FREE_GIB=1e\+09 "
    ):
        require_disk_space(tmp_path, 1e9)


def test_a_home_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match=r"^MILLRACE_HOME: .*home/jobs cannot be written: Not a directory$"):
        require_disk_space(tmp_path / "home" / "jobs", 0.0)


def test_a_machine_with_memory_is_taken(tmp_path: Path) -> None:
    require_memory(0.001, tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    require_memory(0.001, tmp_path)


def test_a_machine_with_too_little_memory_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^this machine has [\d.]+ GiB of memory left, and MILLRACE_MIN_MEMORY_GIB=1e\+06 "
    ):
        require_memory(1e6, tmp_path)


def test_what_a_containers_limit_leaves_counts_and_not_the_machines(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 28}\n")
    require_memory(0.2, tmp_path)
    with pytest.raises(ConfigError, match=r"^the container \(limit 1\.00 GiB\) has 0\.25 GiB of memory left"):
        require_memory(0.5, tmp_path)


def test_the_platform_of_this_environment_is_taken() -> None:
    require_platform(Platform.CPU)


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="this environment computes on GPUs")
@pytest.mark.parametrize(
    ("platform", "words"), [(Platform.NPU, "torch_npu is not installed"), (Platform.CUDA, "computes on CPUs only")]
)
def test_an_image_for_another_platform_is_refused(platform: Platform, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^MILLRACE_PLATFORM={platform}: .*{words}"):
        require_platform(platform)


async def test_a_redis_that_is_away_is_named_without_its_password() -> None:
    url = "redis://learner:canary@127.0.0.1:1/0"
    with pytest.raises(RedisUnavailable, match=r"^REDIS_URL: no Redis answers at 127\.0\.0\.1:1: ") as raised:
        await require_redis(url, wait_s=0.0)
    assert "canary" not in str(raised.value)
