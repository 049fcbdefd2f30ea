"""deploy/secrets.sh."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "deploy/secrets.sh"


def make(folder: Path) -> str:
    return subprocess.run(["sh", str(SCRIPT), str(folder)], capture_output=True, text=True, check=True).stdout


def test_secrets_are_long_all_different_and_behind_a_directory_that_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "secrets"
    make(folder)
    values = [path.read_text() for path in folder.iterdir()]
    assert len(values) == len(set(values)) == 8
    assert all(len(value) == 64 for value in values)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not any(path.stat().st_mode & 0o333 for path in folder.iterdir())


def test_a_second_run_changes_nothing_and_says_nothing(tmp_path: Path) -> None:
    make(tmp_path / "s")
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    assert make(tmp_path / "s") == ""
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before


def test_what_is_missing_or_empty_is_made_and_no_secret_is_shown(tmp_path: Path) -> None:
    make(tmp_path / "s")
    kept = (tmp_path / "s/gateway_token").read_text()
    (tmp_path / "s/internal_token").unlink()
    (tmp_path / "s/grafana_password").chmod(0o600)
    (tmp_path / "s/grafana_password").write_text("")
    said = make(tmp_path / "s")
    assert [line.rpartition("/")[2] for line in said.splitlines()] == ["internal_token", "grafana_password"]
    assert (tmp_path / "s/gateway_token").read_text() == kept
    assert not any(path.read_text() in said for path in (tmp_path / "s").iterdir())
