"""Which steps can be replayed, from what; and everything else is one clear error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.learner.replay.compare import differing, distances
from services.learner.replay.plan import Pass, Plan, changed_spec, make_plan
from services.learner.replay.report import ReplayReport
from tests.unit.common.models.test_directory import make_model
from tests.unit.learner.journalled_job import CHECKPOINT, STEPS, JournalledJob, digest
from tests.unit.learner.scored_groups import make_spec


class Home:
    """A home with a model and one job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "jobs" / "job"
        make_model(root / "models" / "tiny")

    def plan(self, first: int, last: int | None = None) -> Plan:
        return make_plan(self.folder, Settings(home=self.root), first, last)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def written(home: Home) -> Home:
    JournalledJob().write(home.folder)
    return home


@pytest.mark.parametrize(("first", "start"), [(0, 0), (2, 0), (3, CHECKPOINT), (4, CHECKPOINT)])
def test_it_begins_with_the_newest_checkpoint_up_to_the_version_asked_for(
    written: Home, first: int, start: int
) -> None:
    plan = written.plan(first)
    assert (plan.first, plan.start, plan.last) == (first, start, STEPS)
    assert plan.load == (written.folder / "checkpoints" / f"step-{start:08d}" if start else None)
    assert plan.digests == {version: digest(version) for version in range(start, STEPS + 1)}
    assert sorted(plan.checkpoints) == [step for step in (CHECKPOINT, STEPS) if step > start]


def test_a_job_that_was_recorded_before_there_were_revisions_is_rerun_by_the_first_and_a_what_if_may_take_the_newest(
    written: Home,
) -> None:
    path = written.folder / "spec.yaml"
    path.write_text(path.read_text().replace("  revision: 2\n", ""))
    recorded = written.plan(0).spec
    assert recorded.algorithm.revision == 1
    document = recorded.model_dump(mode="json")
    document["algorithm"]["revision"] = 2
    assert changed_spec(recorded, document)[1] == {"algorithm.revision": 2}


def test_a_range_ends_where_it_is_told_and_its_last_version_has_the_next_records_digest(written: Home) -> None:
    plan = written.plan(1, 2)
    assert (plan.start, plan.last, plan.checkpoints) == (0, 2, {})
    assert plan.digests == {version: digest(version) for version in range(3)}


def test_a_damaged_checkpoint_is_passed_over(written: Home) -> None:
    (written.folder / "checkpoints" / "step-00000003" / "weights").write_bytes(b"xx")
    plan = written.plan(4)
    assert (plan.start, plan.load, len(plan.remarks)) == (0, None, 1)
    assert "step-00000003/weights" in plan.remarks[0]


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (5, None, r"--from 5: must be a policy version from 0 to 4"),
        (-1, None, r"--from -1: must be"),
        (3, 3, r"--from 3: must be a policy version from 0 to 2"),
        (0, 6, r"--to 6: the journal ends at step 5"),
    ],
)
def test_a_range_that_is_not_there_is_an_error(written: Home, first: int, last: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        written.plan(first, last)


def test_a_job_without_a_journal_is_an_error(written: Home) -> None:
    (written.folder / "journal").rename(written.folder / "gone")
    with pytest.raises(ConfigError, match="there is no journal"):
        written.plan(0)


def test_steps_that_neither_journal_nor_checkpoint_has_are_an_error(home: Home) -> None:
    job = JournalledJob()
    del job.records[:2]  # what is left begins with step 3
    job.write(home.folder)
    with pytest.raises(ConfigError, match="--from 2: step 1 is not in the journal, and no checkpoint"):
        home.plan(2)
    assert home.plan(3).start == CHECKPOINT


def test_damage_is_an_error_only_where_it_lies_in_the_range(written: Home) -> None:
    [segment] = (written.folder / "journal").glob("*.wal")
    data = bytearray(segment.read_bytes())
    data[len(data) * 5 // 8] ^= 1
    segment.write_bytes(data)
    with pytest.raises(
        ConfigError, match=rf"{segment.name}: the record at byte \d+ is damaged; the steps up to \d can be"
    ):
        written.plan(0)
    assert written.plan(0, 2).last == 2


def test_a_pass_reads_back_as_it_was_written(tmp_path: Path) -> None:
    task = Pass("/f", {"a": 1}, None, 0, 3, {"3": "/c"}, str(tmp_path / "work"), keep_state_at=2)
    assert Pass.read(task.write()) == task


def document(**sections: dict[str, Any]) -> dict[str, Any]:
    made = make_spec().model_dump(mode="json")
    for name, values in sections.items():
        made[name] |= values
    return made


def test_a_change_of_loss_and_optimizer_can_be_tried() -> None:
    spec, changes = changed_spec(make_spec(), document(algorithm={"clip_ratio_high": 0.3}, learner={"lr": 1e-3}))
    assert changes == {"algorithm.clip_ratio_high": 0.3, "learner.lr": 1e-3}
    assert spec.algorithm.clip_ratio_high == 0.3


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"algorithm": {"clip_ratio_hgh": 0.3}},
            r"--set algorithm\.clip_ratio_hgh: is not a setting; did you mean clip_ratio_high",
        ),
        ({"learner": {"lr": -1}}, r"--set learner\.lr: .*greater than 0"),
        ({"rollout": {"group_size": 4}}, r"--set rollout\.group_size: decides what is sampled"),
        ({"algorithm": {"filter_groups_enable": False}}, r"--set algorithm\.filter_groups_enable: decides"),
        ({"learner": {"steps": 3}}, r"--set learner\.steps: decides"),
        ({}, "nothing to compare"),
    ],
)
def test_a_change_that_recorded_data_cannot_follow_is_named(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changed_spec(make_spec(), document(**sections))


def state_file(path: Path, tensors: dict[str, torch.Tensor], counters: str = "{}") -> Path:
    save_file(tensors, path, metadata={"about": f'{{"counters": {counters}}}'})
    return path


def test_a_difference_of_one_bit_is_found_and_random_states_are_no_difference(tmp_path: Path) -> None:
    a = {
        "w": torch.tensor([1.0, float("nan")]),
        "m": torch.zeros(2, 2),
        "s": torch.tensor(3.0),
        "rng.cpu": torch.zeros(1),
    }
    ours = state_file(tmp_path / "a", a)
    assert differing(ours, state_file(tmp_path / "b", a | {"rng.cpu": torch.ones(1)})) == (3, [])
    minus_zero = torch.zeros(2, 2)
    minus_zero[1, 1] = -0.0
    for changed, name in (
        (a | {"m": minus_zero}, "m"), (a | {"s": torch.tensor(3.0000002)}, "s"), (a | {"w": a["w"].double()}, "w"),
        (a | {"m": torch.zeros(4)}, "m"), (a | {"x": torch.zeros(1)}, "x"), ({k: v for k, v in a.items() if k != "s"}, "s"),
    ):  # fmt: skip
        assert differing(ours, state_file(tmp_path / "c", changed))[1] == [name]
    assert differing(ours, state_file(tmp_path / "d", a, '{"optimizer.0": 3}'))[1] == ["the optimizer's step counters"]


def test_distances_are_euclidean_over_all_weights() -> None:
    before = {"a": torch.zeros(2), "b": torch.zeros(1)}
    recorded = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    changed = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0])}
    assert distances(before, recorded, changed) == {"apart": 1.0, "trained": 5.0, "weights": 5.0}


def test_a_version_is_proved_only_by_something_recorded(written: Home) -> None:
    plan = written.plan(3)
    report = ReplayReport(replace(plan, digests={3: digest(3)}))
    for step in (3, 4, 5):
        report.take_recorded({"kind": "version", "step": step, "digest": digest(step), "stats": None})
    report.take_recorded({"kind": "checkpoint", "step": 5, "tensors": 7, "different": []})
    assert (report.equal, report.unproved) == (True, [4])
    report.take_recorded({"kind": "checkpoint", "step": 5, "tensors": 7, "different": ["rank 0: w"]})
    assert report.equal is False
    report = ReplayReport(plan)
    report.take_recorded({"kind": "version", "step": 3, "digest": digest(9), "stats": None})
    assert report.equal is False
