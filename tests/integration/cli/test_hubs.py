"""`millrace models` and `millrace data pull|list|remove`, with a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.common.config.settings import Settings
from services.common.jobs.folder import JobFolder
from services.common.spec.job import JobSpec, dump_spec
from tests.fake_hub import FakeHub
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    with FakeHub() as started:
        started.add("models/org/tiny", {path.name: path.read_bytes() for path in folder.iterdir()})
        started.add("datasets/org/sums", {"easy/train.jsonl": b'{"prompt": "1 + 1 ="}\n'})
        yield started


@pytest.fixture
def home(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("kind", "text", "nothing"),
    [
        ("models", "hf:org/tiny", "there is no model yet"),
        ("data", "hf:org/sums/easy/train.jsonl", "nothing was fetched"),
    ],
)
def test_what_is_pulled_is_listed_and_can_be_removed(kind: str, text: str, nothing: str) -> None:
    assert nothing in run(kind, "list").stdout
    pulled = run(kind, "pull", text)
    assert pulled.exit_code == 0, pulled.output
    pinned = pulled.stdout.strip().splitlines()[-1]
    (item,) = json.loads(run(kind, "list", "--json").stdout)
    assert (item["reference"], item["whole"]) == (pinned, True)
    assert pinned in run(kind, "list").stdout
    assert Path(item["path"]).exists()
    assert run(kind, "remove", pinned).exit_code == 0
    assert not Path(item["path"]).exists()
    assert f"{pinned} is not there" in str(run(kind, "remove", pinned).exception)


def test_what_a_job_that_has_not_ended_names_stays_unless_it_is_forced(home: Path) -> None:
    pinned = run("models", "pull", "hf:org/tiny").stdout.strip().splitlines()[-1]
    spec = JobSpec.model_validate({"model": {"path": pinned}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}})
    folder = JobFolder(Settings(home=home).job_dir("job-1"))
    folder.save({"state": "queued", "incarnation": 0}, lambda: dump_spec(spec))
    assert "is named by job-1, which has not ended" in str(run("models", "remove", pinned).exception)
    assert run("models", "remove", pinned, "--force").exit_code == 0


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "pull", "org/tiny"), "is no reference to a hub: write hf:ORG/NAME"),
        (("models", "pull", "hf:org/none"), "hf:org/none: there is no such model on http"),
        (("data", "pull", "hf:org/sums"), "names no file"),
        (("models", "remove", "hf:org/tiny"), "name the commit"),
    ],
)
def test_a_wrong_reference_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    assert message in str(run(*arguments).exception)
