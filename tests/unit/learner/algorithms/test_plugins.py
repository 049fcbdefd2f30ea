"""Estimators and losses of installed packages: known by name without an import, checked when they run, treated as the built-in ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.config.plugins import ADVANTAGES, LOSSES, available, check_installed, offered
from services.common.errors import ConfigError
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator, LossName
from services.learner.algorithms.advantages import Responses, estimate
from services.learner.algorithms.losses import make_loss
from tests import plugin_package
from tests.unit.learner.algorithms.references import Token, random_tokens, to_inputs

SOURCE = """
import numpy as np
import torch
from services.learner.algorithms.advantages import Estimate

def rewards(responses, algorithm):
    each = zip(responses.rewards, responses.masks, strict=True)
    return Estimate([np.full(len(mask), reward) for reward, mask in each], returns=responses.values)

def too_few(responses, algorithm): return Estimate([])
def too_long(responses, algorithm): return Estimate([np.zeros(len(mask) + 1) for mask in responses.masks])
def infinite(responses, algorithm): return Estimate([np.full(len(mask), np.inf) for mask in responses.masks])
def words(responses, algorithm): return Estimate([["a"] * len(mask) for mask in responses.masks])
def nothing(responses, algorithm): return None
def bad_returns(responses, algorithm): return Estimate([np.zeros(len(m)) for m in responses.masks], returns=[])

def surrogate(inputs, algorithm):
    ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
    return -ratio * inputs.advantages / inputs.loss_mask, {"odd_ratio": ratio.detach()}

def summed(inputs, algorithm): return inputs.trainer_logprobs.sum(), {}
def odd_metric(inputs, algorithm): return inputs.trainer_logprobs, {"odd": torch.zeros(1)}
no_function = 3
"""
ESTIMATORS = ["rewards", "too_few", "too_long", "infinite", "words", "nothing", "bad_returns"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package of odd algorithms."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "odd_algorithms.py").write_text(SOURCE)
    estimators = [f"odd_{name} = odd_algorithms:{name}" for name in ESTIMATORS]
    losses = [f"odd_{name} = odd_algorithms:{name}" for name in ("surrogate", "summed", "odd_metric", "no_function")]
    points = {
        "millrace.advantages": [*estimators, "odd_missing = odd_algorithms:nowhere", "gae = odd_algorithms:rewards"],
        "millrace.losses": [*losses, "odd_broken = no_such_package:loss", "dapo = odd_algorithms:summed"],
    }
    plugin_package.install(folder, "odd-algorithms", points)
    return folder


@pytest.fixture(autouse=True)
def _installed_here(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(site)
    offered.cache_clear()
    yield
    offered.cache_clear()


TWO, NONE = np.ones(2, np.float32), np.ones(0, np.float32)
RESPONSES = Responses([1, 1], [1.0, -3.0], [TWO > 0, NONE > 0], values=[TWO, NONE])


def test_names_are_known_after_the_built_in_ones_which_no_package_can_take() -> None:
    names = available(ADVANTAGES, AdvantageEstimator)
    assert names[: len(AdvantageEstimator)] == list(AdvantageEstimator)
    assert "odd_rewards" in names
    assert names.count("gae") == 1
    assert available(LOSSES, LossName).count("dapo") == 1
    assert make_loss(AlgorithmSpec(loss="dapo"))(to_inputs(random_tokens(1)))[0].ndim == 1


def test_a_job_that_names_what_is_installed_is_right_and_any_other_is_told_what_there_is() -> None:
    check_installed(AlgorithmSpec())
    check_installed(AlgorithmSpec(advantage_estimator="odd_rewards", loss="odd_surrogate"))
    with pytest.raises(ConfigError) as error:
        check_installed(AlgorithmSpec(advantage_estimator="odd_surrogate", loss="odd_rewards"))
    assert [problem.field for problem in error.value.problems] == ["algorithm.advantage_estimator", "algorithm.loss"]
    for problem, group in zip(error.value.problems, (("gae", "odd_rewards"), ("cispo", "odd_surrogate")), strict=True):
        assert all(name in problem.message for name in group)


def test_to_check_the_names_nothing_is_imported(site: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from services.common.config.plugins import check_installed\n"
        "from services.common.spec.algorithm import AlgorithmSpec\n"
        "check_installed(AlgorithmSpec(advantage_estimator='odd_rewards', loss='odd_surrogate'))\n"
        "print([name for name in ('torch', 'odd_algorithms') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_an_installed_estimator_gives_the_advantages_and_the_clip_comes_after() -> None:
    found = estimate(RESPONSES, AlgorithmSpec(advantage_estimator="odd_rewards"))
    assert [a.tolist() for a in found.advantages] == [[1.0, 1.0], []]
    assert all(a.dtype == np.float32 for a in found.advantages)
    assert found.returns is not None
    assert [r.tolist() for r in found.returns] == [[1.0, 1.0], []]
    clipped = estimate(RESPONSES, AlgorithmSpec(advantage_estimator="odd_rewards", advantage_clip=0.5))
    assert clipped.advantages[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("odd_too_few", "0 for 2 responses"),
        ("odd_too_long", r"shape \(3,\) for 2 tokens at response 0"),
        ("odd_infinite", "not finite at response 0"),
        ("odd_words", "no arrays of numbers"),
        ("odd_nothing", "returned NoneType"),
        ("odd_bad_returns", "returns of estimator 'odd_bad_returns' are 0 for 2"),
        ("odd_missing", "cannot be loaded"),
        ("odd_nowhere", "no installed package offers 'odd_nowhere'"),
    ],
)
def test_a_wrong_estimator_is_named(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        estimate(RESPONSES, AlgorithmSpec(advantage_estimator=name))
    assert error.value.problems[0].field == "algorithm.advantage_estimator"
    assert name in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_level_loss": False},
        {"importance_correction": "decoupled", "proximal_kl_coefficient": 0.1},
        {"kl_coefficient": 0.3, "entropy_coefficient": 0.05},
    ],
)
def test_an_installed_loss_is_corrected_and_regularized_like_a_built_in_one(options: dict[str, Any]) -> None:
    """It divides by zero at masked tokens, which must not matter."""
    gradients = []
    for name in ("odd_surrogate", "surrogate"):
        inputs = replace(to_inputs(random_tokens(4)), kl_coefficient=0.3)
        token_loss, metrics = make_loss(AlgorithmSpec.model_validate({"loss": name} | options))(inputs)
        assert (token_loss[~inputs.loss_mask] == 0.0).all()
        gradients.append((token_loss.sum(), *torch.autograd.grad(token_loss.sum(), [inputs.trainer_logprobs])))
        if name == "odd_surrogate":
            assert (metrics["odd_ratio"][~inputs.loss_mask] == 0.0).all()
            assert metrics["odd_ratio"].sum() > 0.0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("odd_summed", "token losses must be a tensor of shape"),
        ("odd_odd_metric", "odd must be a tensor of shape"),
        ("odd_no_function", "is no function"),
        ("odd_broken", "cannot be loaded"),
        ("odd_nowhere", "no installed package offers"),
    ],
)
def test_a_wrong_loss_is_named(name: str, problem: str) -> None:
    tokens = [Token(-1.0, -1.0, -1.0, 1.0, True, 0)] * 2
    with pytest.raises(ConfigError, match=problem) as error:
        make_loss(AlgorithmSpec(loss=name))(to_inputs(tokens))
    assert error.value.problems[0].field == "algorithm.loss"
    assert name in str(error.value)
