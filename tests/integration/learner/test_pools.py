"""Roles with ranks of their own: whatever their placement, a job computes the same bits, and goes on from the checkpoint of any other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.integration.learner.rank_runs import HERE, TIMEOUT_S, run

PLACEMENTS = {"actor": "", "own": "critic,reference", "critic": "critic", "back": ""}
"""Name of a run → roles with ranks of their own; in this order, and each goes on from the checkpoints of those before it, too."""
SIZES = {"one": ("megatron", 1), "fsdp": ("fsdp2", 1), "tp": ("megatron", 2), "fsdp_dp": ("fsdp2", 2)}
"""Back end, and ranks of the actor."""
QUICK = ("one",)
pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)  # the first test waits for the ranks


@pytest.fixture(scope="module", params=[pytest.param(s, marks=[pytest.mark.slow] * (s not in QUICK)) for s in SIZES])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What each placement said, with one back end and layout."""
    backend, ranks = SIZES[request.param]
    root = tmp_path_factory.mktemp(f"pools-{request.param}")
    run([str(HERE / "roles_reference.py"), str(root)])
    said: dict[str, Any] = {}
    for name, own in PLACEMENTS.items():
        processes = ranks * (1 + len([role for role in own.split(",") if role]))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        run([*launch, str(HERE / "pools_ranks.py"), str(root), name, request.param, own, *said, backend])
        said[name] = json.loads((root / f"{name}.json").read_text())
    return said


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "actor"])
class TestPlacements:
    def test_every_step_and_what_the_roles_say_afterwards_are_the_same_bits(
        self, runs: Mapping[str, Any], placement: str
    ) -> None:
        found, expected = runs[placement]["trained"], runs["actor"]["trained"]
        assert len(expected["records"]) == 3
        assert all(record["skipped"] == "" for record in expected["records"])
        assert found == expected

    def test_a_job_goes_on_from_the_checkpoint_of_every_placement_as_if_it_had_not_stopped(
        self, runs: Mapping[str, Any], placement: str
    ) -> None:
        expected = runs["actor"]["trained"] | {"records": runs["actor"]["trained"]["records"][-1:]}
        assert len(runs[placement]["loaded"]) == 1 + list(PLACEMENTS).index(placement)
        for folder, found in runs[placement]["loaded"].items():
            assert found == expected, folder

    def test_critic_and_reference_begin_with_the_weights_that_the_actor_begins_with(
        self, runs: Mapping[str, Any], placement: str
    ) -> None:
        found, expected = runs[placement]["begun"], runs["actor"]["begun"]
        assert expected["True"]["reference"] == expected["False"]["reference"] != runs["actor"]["trained"]["reference"]
        assert found == expected


def test_a_role_with_ranks_of_its_own_has_files_of_its_own_in_a_checkpoint(runs: Mapping[str, Any]) -> None:
    def begins(placement: str) -> set[str]:
        return {name.partition("rank-")[0] for name in runs[placement]["files"]}

    assert begins("actor") == begins("back") == {""}
    assert begins("critic") == {"", "critic-"}
    assert begins("own") == {"", "critic-", "reference-"}
