"""Recorded steps rerun in ranks of their own give the same weights, bit for bit; and where they cannot, the replay says so."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from services.common.jobs.folder import SPEC_FILE
from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis.connection import connect
from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.storage.journal import Journal
from tests.integration.learner.peers import Learner, Peers, play, until
from tests.integration.rollout.conftest import write_model
from tests.unit.learner.old_folder import as_before_turns

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("redis_url", ["embedded"], indirect=True),
    pytest.mark.timeout(600),
]

STEPS = 7
"""Checkpoints are written about every third step and at the end, and two are kept."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "float32": {},
    "dp": {"learner": {"data_parallel_size": 2, "use_distributed_optimizer": True}},
    "tp": {"learner": {"tensor_parallel_size": 2}},
    "fsdp": {"learner": {"backend": "fsdp2", "data_parallel_size": 2}},
    "adapters": {"model": {"lora": {"rank": 4}}, "learner": {"backend": "fsdp2"}},
    "ppo": {
        "algorithm": {"preset": "ppo", "kl_coefficient": 0.1, "kl_target": 0.01, "kl_horizon": 50, "entropy_coefficient": 0.01},
        "learner": {"mini_batch_size": 1, "ppo_epochs": 2},
        "critic": {"lr": 1e-3, "lr_warmup_steps": 0, "warmup_steps": 1},
        "reference": {"rebase_interval_steps": 2},
    },
}  # fmt: skip
"""By layout or algorithm, what its job's sections say."""
EPISODES: dict[str, Any] = {
    "data": {"train": {"source": "environment:guess_number", "size": 100}},
    "environment": {"max_turns": 3, "max_turn_tokens": 4},
    "reward": {"verifiers": {"*": "environment"}},
    "rollout": {"rollout_max_tokens": 32},
}
LAYOUTS["episodes"] = EPISODES
LAYOUTS["turns"] = EPISODES | {"algorithm": {"turn_credit": "turn"}}
"""Of several turns, with the two ways to credit them."""
EVERY_LAYOUT = [
    "one",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("dp", "tp", "fsdp", "adapters", "ppo", "episodes", "turns")
    ),
]


@dataclass(frozen=True)
class Recorded:
    """A job that a real learner trained; its Redis is of no use any more."""

    home: Path
    id: str
    roles: bool = False
    """Whether it has critic and reference, and a first step that trains only the critic."""

    @property
    def folder(self) -> Path:
        return self.home / "jobs" / self.id

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))

    def replay(self, *arguments: str, platform: str = "cpu") -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        command = [sys.executable, "-m", "services.cli.main", "replay", self.id, "--home", str(self.home), "--json"]
        done = subprocess.run(
            [*command, *arguments],
            env=environment | {"REDIS_URL": "redis://127.0.0.1:1/0", "MILLRACE_PLATFORM": platform},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        return done, json.loads(done.stdout) if done.stdout else {}

    def contents(self) -> dict[str, str]:
        """Digest of each file; the job's record may be about to be replaced."""
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def job(sections: dict[str, Any], dtype: str) -> JobSpec:
    spec: dict[str, Any] = {
        "name": "recorded",
        "model": {"path": "tiny", "dtype": dtype},
        "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 100}},
        "rollout": {"group_size": 4, "rollout_max_tokens": 8},
        "algorithm": {"filter_groups_train_batch_size": 2},
        "learner": {"steps": STEPS, "lr": 1e-3, "lr_warmup_steps": 3},
        "checkpoint": {"interval_steps": 3, "keep_last": 2, "export": False},
        "eval": {"enabled": False},
    }
    return JobSpec.model_validate(spec | {name: spec.get(name, {}) | given for name, given in sections.items()})


async def train(home: Path, redis_url: str, spec: JobSpec) -> str:
    redis = connect(redis_url, block_s=2.0)
    await redis.flushall()
    learner, store = Learner(redis_url, home), JobStore(redis)
    job_id = (await store.create(spec)).id
    peers = Peers(redis, redis_url, job_id, reply=play if spec.environment is not None else None)
    peers.answering.set()
    answering = asyncio.create_task(peers.run())
    try:
        learner.start()
        ended = await until(store, job_id, lambda record: record.state.ended, learner)
        assert ended.state is JobState.SUCCEEDED
    finally:
        learner.kill()
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering
        await redis.aclose()
    return job_id


@pytest.fixture(scope="session")
def trained() -> dict[str, Recorded]:
    """The jobs that were trained already, by layout: once each is enough."""
    return {}


@pytest.fixture
def recorded(
    request: pytest.FixtureRequest,
    trained: dict[str, Recorded],
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Recorded:
    layout = request.param
    if layout not in trained:
        home = tmp_path_factory.mktemp(f"recorded-{layout}")
        write_model(home / "models" / "tiny")
        dtype = "bfloat16" if layout in {"one", "ppo", "adapters"} else "float32"  # those with master weights too
        spec = job(LAYOUTS[layout], dtype)
        trained[layout] = Recorded(home, asyncio.run(train(home, redis_url, spec)), spec.critic is not None)
    return trained[layout]


@pytest.mark.parametrize("recorded", EVERY_LAYOUT, indirect=True)
def test_every_step_from_the_initial_model_on_is_proved_bit_for_bit(recorded: Recorded) -> None:
    before = recorded.contents()
    done, report = recorded.replay("--from", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    versions = report["versions"]
    assert [version["step"] for version in versions] == list(range(STEPS + 1))
    assert all(version["proved"] for version in versions), versions
    assert (report["equal"], report["unproved"], report["begins_with"]) == (
        True,
        [],
        "the model that the job began with",
    )
    warm_up = 1 if recorded.roles else 0
    digests = [version["digest"] for version in versions]
    assert len(set(digests[warm_up:])) == STEPS + 1 - warm_up, "a step that changes nothing proves nothing"
    assert len(set(digests[: warm_up + 1])) == 1, "the critic's warm-up leaves the policy as it is"
    held = {version["step"]: version["checkpoint_tensors"] for version in versions if version["checkpoint_tensors"]}
    assert list(held) == recorded.checkpoints
    assert len(held) == 2
    assert all(count > 20 for count in held.values())
    assert all(("value_loss" in version["stats"]) is recorded.roles for version in versions[1:])
    assert recorded.contents() == before


@pytest.mark.parametrize("recorded", ["episodes", "turns"], indirect=True)
def test_a_replayed_step_of_episodes_has_counted_the_sampled_tokens_of_its_journal(recorded: Recorded) -> None:
    first = STEPS - 3
    done, report = recorded.replay("--from", str(first))
    assert done.returncode == 0, done.stderr[-3000:]
    counted = {
        version["step"]: version["stats"]["loss_tokens"] for version in report["versions"] if version["step"] > first
    }
    turns = set()
    for record in Journal(recorded.folder / "journal").records():
        if not record.groups or record.step <= first:
            continue
        groups = [decode(ScoredGroup, payload, MIN_ENTRY_BYTES).group for payload in record.groups]
        turns |= {len(rollout.turns) for group in groups for rollout in group.rollouts}
        everything = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
        assert counted.pop(record.step) == sum(group.sampled_tokens for group in groups) < everything
    assert counted == {}
    assert turns == {1, 2, 3}


@pytest.mark.parametrize("recorded", ["one"], indirect=True)
def test_a_folder_of_a_release_without_turns_is_proved_bit_for_bit(recorded: Recorded, tmp_path: Path) -> None:
    old = Recorded(Path(shutil.copytree(recorded.home, tmp_path / "home")), recorded.id)
    before = (old.folder / SPEC_FILE).read_text()
    as_before_turns(old.folder)
    assert (old.folder / SPEC_FILE).read_text() != before
    done, report = old.replay("--from", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(report["versions"]) == STEPS + 1
    assert all(version["proved"] for version in report["versions"])


@pytest.mark.parametrize("recorded", [*EVERY_LAYOUT[:2], "ppo"], indirect=True)
def test_a_replay_goes_on_from_a_checkpoint_and_stops_where_it_is_told(recorded: Recorded) -> None:
    first = recorded.checkpoints[0]
    done, report = recorded.replay("--from", str(first))
    assert done.returncode == 0, done.stderr[-3000:]
    assert report["begins_with"] == f"the checkpoint of step {first}"
    assert [version["step"] for version in report["versions"]] == list(range(first, STEPS + 1))
    assert all(version["proved"] for version in report["versions"])
    done, report = recorded.replay("--from", "1", "--to", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [version["step"] for version in report["versions"]] == [0, 1, 2]


@pytest.mark.parametrize("recorded", ["ppo"], indirect=True)
@pytest.mark.parametrize(
    ("change", "value", "at_once", "later"),
    [
        ("algorithm.lam", 0.9, ("value_loss", "grad_norm"), "value_loss"),
        ("critic.lr", 1e-2, ("value_loss", "critic_lr"), "value_loss"),
        ("algorithm.kl_horizon", 5, (), "kl_coefficient"),
        ("reference.rebase_interval_steps", 5, (), "reference_kl"),
    ],
)
def test_a_what_if_of_a_role_shows_the_difference_in_its_figures(
    recorded: Recorded, change: str, value: float, at_once: tuple[str, ...], later: str
) -> None:
    done, report = recorded.replay("--from", "1", "--to", "4", "--set", f"{change}={value}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert report["set"] == {change: value}
    assert report["equal"] is True
    assert [item["step"] for item in report["changed"]] == [2, 3, 4]
    (first, _, last), versions = (item["stats"] for item in report["changed"]), report["versions"]
    assert [name for name in at_once if first[name] == versions[2]["stats"][name]] == []
    assert last[later] != versions[4]["stats"][later]
    assert report["distance"]["apart"] > 0


@pytest.mark.parametrize("recorded", ["one"], indirect=True)
class TestOfOneRank:
    def test_what_was_not_trained_is_found_out(self, recorded: Recorded, tmp_path: Path) -> None:
        home = tmp_path / "home"
        shutil.copytree(recorded.home, home)
        forged = Recorded(home, recorded.id)
        records = list(Journal(forged.folder / "journal").records())
        shutil.rmtree(forged.folder / "journal")
        group = msgpack.unpackb(records[4].groups[0])
        group["verdicts"][1]["reward"] = 0.125  # one reward of step 5
        records[4] = replace(records[4], groups=(msgpack.packb(group), *records[4].groups[1:]))
        journal = Journal(forged.folder / "journal")
        for record in records:
            journal.append(record)
        done, report = forged.replay("--from", "0")
        assert done.returncode == 1
        assert report["equal"] is False
        assert [version["proved"] for version in report["versions"]] == [True] * 5 + [False] * 3
        assert report["versions"][STEPS]["different"], "the last checkpoint must disagree as well"

    def test_a_what_if_shows_the_difference_and_changes_nothing_of_the_job(self, recorded: Recorded) -> None:
        before = recorded.contents()
        done, report = recorded.replay("--from", "2", "--to", "5", "--set", "algorithm.clip_ratio_high=10.0")
        assert done.returncode == 0, done.stderr[-3000:]
        assert report["set"] == {"algorithm.clip_ratio_high": 10.0}
        assert report["equal"] is True
        assert [item["step"] for item in report["changed"]] == [3, 4, 5]
        first = report["changed"][0]["stats"]
        same = report["versions"][3]["stats"]
        assert first["entropy"] == same["entropy"], "the first changed step begins with the recorded weights"
        # the peers' log-probs are about 1 nat from the learner's: tokens beyond a ratio of 1.28 are there for sure, few are beyond 11
        assert first["clip_fraction_high"] < same["clip_fraction_high"]
        assert first["grad_norm"] != same["grad_norm"]
        assert 0 < report["distance"]["apart"] < report["distance"]["weights"]
        assert recorded.contents() == before

    def test_a_what_if_in_another_layout_differs_by_rounding(self, recorded: Recorded) -> None:
        done, report = recorded.replay("--from", "6", "--set", "learner.tensor_parallel_size=2")
        assert done.returncode == 0, done.stderr[-3000:]
        assert report["equal"] is True
        (changed,) = report["changed"]
        here, there = changed["stats"], report["versions"][-1]["stats"]
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=2e-2)
        assert here["loss"] == pytest.approx(there["loss"], abs=2e-2)
        assert report["distance"]["apart"] < 0.5 * report["distance"]["trained"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--from", "7"], "must be a policy version from 0 to 6"),
            (["--from", "0", "--to", "8"], "--to 8: the journal ends at step 7"),
            (["--from", "0", "--set", "algorithm.clip_ratio_hgh=0.3"], "algorithm.clip_ratio_hgh"),
            (["--from", "0", "--set", "rollout.group_size=2"], "decides what is sampled"),
            (["--from", "0", "--set", "algorithm.clip_ratio_high=0.28"], "nothing to compare"),
        ],
    )
    def test_what_cannot_be_replayed_is_one_line(self, recorded: Recorded, arguments: list[str], said: str) -> None:
        done, _ = recorded.replay(*arguments)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
