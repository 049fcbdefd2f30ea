"""The loss and the advantage that docs/algorithms.md shows fit the interfaces of installed ones."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from services.common.config import plugins
from services.common.config.plugins import ADVANTAGES, LOSSES, check_installed
from services.common.spec.algorithm import AlgorithmSpec
from services.learner.algorithms.advantages import Responses, estimate
from services.learner.algorithms.losses import LossInputs, make_loss

DOCUMENT = (Path(__file__).parents[4] / "docs/algorithms.md").read_text()


@pytest.fixture
def algorithm(monkeypatch: pytest.MonkeyPatch) -> AlgorithmSpec:
    """A job's section that names both functions, which a package offers as the document says."""
    [source] = re.findall(r"^```\n# my_algorithms\.py\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    module = ModuleType("my_algorithms")
    exec(source, module.__dict__)  # noqa: S102  the document's own example
    monkeypatch.setitem(__import__("sys").modules, "my_algorithms", module)
    points = dict(re.findall(r'^(\w+) = "(my_algorithms:\w+)"$', DOCUMENT, re.MULTILINE))
    groups = {LOSSES: "squared", ADVANTAGES: "centred"}
    offered = {group: {name: EntryPoint(name=name, value=points[name], group=group)} for group, name in groups.items()}
    for target in (plugins, __import__("services.learner.algorithms.plugins", fromlist=["offered"])):
        monkeypatch.setattr(target, "offered", lambda group: offered.get(group, {}))
    [settings] = re.findall(r"^algorithm: \{loss: (\w+), advantage_estimator: (\w+)\}$", DOCUMENT, re.MULTILINE)
    return AlgorithmSpec(loss=settings[0], advantage_estimator=settings[1])


def test_the_loss_has_a_gradient_and_its_metric(algorithm: AlgorithmSpec) -> None:
    check_installed(algorithm)
    trainer = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old, advantages = torch.tensor([-1.5, -2.0, -9.0]), torch.tensor([1.0, -1.0, 5.0])
    inputs = LossInputs(
        trainer_logprobs=trainer, old_logprobs=old, inference_logprobs=old, advantages=advantages,
        loss_mask=torch.tensor([True, True, False]), sequence_ids=torch.tensor([0, 0, 0]), global_tokens=2,
        global_sequences=1, entropy=torch.zeros(3),
    )  # fmt: skip
    loss, metrics = make_loss(algorithm)(inputs)
    expected = [0.25 / (2 * algorithm.clip_ratio_high) - np.exp(0.5), 1.0, 0.0]
    assert loss.detach().numpy() == pytest.approx(expected)
    assert metrics["log_ratio_penalty"].tolist() == pytest.approx([0.25 / 0.56, 0.0, 0.0])
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert trainer.grad is not None
    assert trainer.grad[2] == 0.0


def test_the_advantage_is_centred_over_the_batch(algorithm: AlgorithmSpec) -> None:
    responses = Responses([1, 2], [1.0, 0.0], [np.array([True, True]), np.array([True])])
    found = estimate(responses, algorithm)
    assert [values.tolist() for values in found.advantages] == [[0.5, 0.5], [-0.5]]
