"""Who may import whom. Arrows fall from left to right: a new upward import, or a cycle, is a red test."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.unit.imports import MODULES, ROOT, imports

HEAVY = {"torch", "vllm", "fastapi", "megatron", "mbridge", "transformers"}
TRIALS = {f"services.common.models.{name}" for name in ("trial", "classifier", "prompts")}
"""They load tokenizers and configurations, within their functions; transformers does that without torch."""
REWARD_MODEL = {"services.reward.reward_model.classifier", "services.reward.reward_model.platform"}
"""They are imported in a reward model's own process alone."""
UNPICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}

LAYERS: Mapping[str, tuple[str, ...]] = {
    "cli": (
        "main", "commands", "connect", "up", "doctor", "checks", "stack", "imports", "overrides", "views", "prepare", "logs",
    ),
    "common": (
        "catalog", "hubs", "checkpoints", "data", "environments", "sandbox", "programs", "models", "streams", "capacity", "jobs",
        "weight_sync", "service", "config", "redis", "spec", "weights", "batches", "durable", "differences", "errors", "pb",
    ),
    "environment": ("__main__", "service", "server", "players", "player", "registry", "worlds", "switches", "base", "metrics"),
    "gateway": (
        "__main__", "app", "header_deadline", "routes", "history", "dependencies", "fetches", "admission", "trackers", "events", "openai",
        "metrics", "middleware", "errors", "system_metrics", "samples", "search", "schemas",
    ),
    "learner": (
        "__main__", "agent", "rank", "controller", "replay", "conversion", "audit", "loops", "weights", "ranks", "backends",
        "megatron", "fsdp2", "training", "storage",
        "groups", "algorithms",
    ),
    "millrace": (
        "coroutines", "client", "job", "progress", "follower", "chat", "frames", "document", "connection", "gateway", "records",
    ),
    "reward": (
        "__main__", "service", "session", "trials", "samples", "models", "dispatch", "judge", "reward_model", "scorers", "pool",
        "verifiers", "metrics",
    ),
    "rollout": ("__main__", "service", "chat", "session", "sampling", "weights", "engine", "metrics"),
}  # fmt: skip
"""Service, or the client's package → its rooms (folders, and modules beside them), each of which may import those after it."""
CLIENT_NEEDS = {"services.common.errors"}
CLIENT_USES = CLIENT_NEEDS | {"services.common.service.stack_state", "services.common.spec.document"}
"""All that the client's package imports of the services: at its start, and anywhere."""


def within(module: str) -> list[str]:
    """`services.learner.groups.ledger` → `learner`, `groups`, `ledger`."""
    return module.removeprefix("services.").split(".")


def room(module: str) -> str:
    """`services.learner.groups.ledger` → `groups`."""
    return within(module)[1]


def upward(service: str, layers: tuple[str, ...], graph: Mapping[str, set[str]]) -> list[str]:
    """Imports that do not fall from left to right."""
    found = []
    for module, imported in graph.items():
        for other in imported:
            inside = all(within(name)[0] == service and len(within(name)) > 1 for name in (module, other))
            if inside and layers.index(room(module)) > layers.index(room(other)):
                found.append(f"{module} imports {other}")
    return found


def graph_of(service: str) -> dict[str, set[str]]:
    """Module → modules of the same service that it imports."""
    known = MODULES[service]
    return {
        name: {other for other in imports(path) if other in known and other != name} for name, path in known.items()
    }


@pytest.mark.parametrize("service", sorted(LAYERS))
def test_every_room_has_its_layer(service: str) -> None:
    rooms = {room(name) for name in MODULES[service] if len(within(name)) > 1}
    assert rooms == set(LAYERS[service])


@pytest.mark.parametrize("service", sorted(LAYERS))
def test_arrows_fall_one_way(service: str) -> None:
    assert not upward(service, LAYERS[service], graph_of(service))


@pytest.mark.parametrize("service", sorted(LAYERS))
def test_no_modules_import_each_other(service: str) -> None:
    TopologicalSorter(graph_of(service)).prepare()


def test_an_upward_import_and_a_cycle_are_seen() -> None:
    graph = {
        "services.reward.pool.pool": {"services.reward.service"},
        "services.reward.service": {"services.reward.pool.pool"},
    }
    assert upward("reward", LAYERS["reward"], graph) == ["services.reward.pool.pool imports services.reward.service"]
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(MODULES["common"]))
def test_common_is_a_leaf(name: str) -> None:
    heavy = HEAVY - {"transformers"} if name in TRIALS else HEAVY
    for imported in imports(MODULES["common"][name]):
        parts = imported.split(".")
        assert parts[0] not in heavy | {"millrace"}, f"{name} imports {imported}"
        assert parts[0] != "services" or parts[1] == "common", f"{name} imports {imported}"


@pytest.mark.parametrize("service", ["gateway", "rollout", "reward", "environment", "learner"])
def test_a_service_imports_no_other_service(service: str) -> None:
    for name, path in MODULES[service].items():
        for imported in imports(path):
            parts = imported.split(".")
            assert parts[0] != "services" or parts[1] in {"common", service}, f"{name} imports {imported}"
            assert parts[0] != "millrace", f"{name} imports the client"


@pytest.mark.parametrize("name", sorted(MODULES["millrace"]))
def test_the_client_needs_httpx_alone_and_of_the_services_what_is_named(name: str) -> None:
    path = MODULES["millrace"][name]
    known = {"httpx", "millrace", *sys.stdlib_module_names}
    needed = {imported for imported in imports(path, at_start=True) if imported.partition(".")[0] not in known}
    assert needed <= CLIENT_NEEDS
    assert {imported for imported in imports(path) if imported.startswith("services.")} <= CLIENT_USES


@pytest.mark.parametrize("folder", ["millrace", "services", "examples"])
def test_nobody_unpickles(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert not UNPICKLERS & imports(path), f"{path} imports a pickle"


@pytest.mark.parametrize("service", ["gateway", "reward", "environment", "cli", "millrace"])
def test_a_light_service_imports_no_engine(service: str) -> None:
    for name, path in MODULES[service].items():
        if name in REWARD_MODEL:
            continue
        engines = {"torch", "vllm", "megatron"} & {imported.split(".")[0] for imported in imports(path)}
        assert not engines, f"{name} imports {engines}"


def test_only_a_reward_models_own_process_imports_torch() -> None:
    for name, path in MODULES["reward"].items():
        own = REWARD_MODEL if name in REWARD_MODEL else set()
        assert not REWARD_MODEL & imports(path) - own, f"{name} imports a module of a reward model's process"
