"""A learner of several machines: what its settings must say, and what torchelastic is told."""

from __future__ import annotations

import pytest

from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.learner.ranks.launch import RANK_MODULE, Nodes, launch_command

WORLD = {"worker": "learner-a", "learner_nodes": 4, "learner_rendezvous": "10.0.0.1:29400"}


def nodes(**changes: object) -> Nodes:
    return Nodes.of(Settings(**(WORLD | changes)))  # type: ignore[arg-type]


def test_one_machine_needs_no_setting_and_no_port() -> None:
    alone = Nodes.of(Settings())
    assert alone.leads
    assert alone.own_name("learner-x") == "learner-x"
    assert alone.torchrun_arguments("job-1", 8) == [
        "--nnodes=1", "--nproc-per-node=8", "--rdzv-backend=millrace-local", "--rdzv-id=job-1",
    ]  # fmt: skip


def test_every_machine_runs_its_share_and_only_node_0_hosts_the_rendezvous() -> None:
    for index in range(4):
        arguments = nodes(learner_node=index, advertise_host=f"10.0.0.{index + 1}").torchrun_arguments("job-1", 32)
        assert {"--nnodes=4", "--nproc-per-node=8", "--rdzv-id=job-1"} <= set(arguments)
        assert {"--rdzv-endpoint=10.0.0.1:29400", f"--local-addr=10.0.0.{index + 1}"} <= set(arguments)
        assert any(f"is_host={int(index == 0)}," in argument for argument in arguments)
        command = launch_command(arguments, 3, RANK_MODULE)
        assert command[-3:] == ["--monitor-interval=0.5", "-m", "services.learner.rank"]


def test_only_node_0_has_the_learners_name() -> None:
    assert nodes().own_name("learner-a") == "learner-a"
    assert nodes(learner_node=2).own_name("learner-a") == "learner-a-node2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner_node": 4}, "MILLRACE_LEARNER_NODE=4 must be below MILLRACE_LEARNER_NODES=4"),
        ({"worker": None}, "MILLRACE_WORKER: name the learner, the same on all 4 nodes"),
        ({"learner_rendezvous": None}, "MILLRACE_LEARNER_RENDEZVOUS must be host:port"),
        ({"learner_rendezvous": "10.0.0.1"}, "MILLRACE_LEARNER_RENDEZVOUS must be host:port"),
        ({"learner_rendezvous": "10.0.0.1:99999"}, "MILLRACE_LEARNER_RENDEZVOUS must be host:port"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nodes(**changes)


def test_ranks_that_cannot_be_spread_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 ranks cannot be spread evenly over the learner's 4 nodes"):
        nodes().ranks_here(6)
