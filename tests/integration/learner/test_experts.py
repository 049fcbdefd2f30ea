"""Mixtures of experts on Megatron against plain transformers and torch, with the experts on one rank and divided over ranks."""

from __future__ import annotations

import pytest

from tests.integration.learner.experts_cases import LAYOUTS, MODELS, QUICK
from tests.integration.learner.rank_runs import TIMEOUT_S, Outcome, outcome_of
from tests.integration.learner.test_trainer import update_error

EVERY_LAYOUT = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAYOUTS]
FIGURES = ("router_load_max", "router_load_min", "router_entropy")
"""Of the routers, those that do not depend on how positions are divided into micro-batches."""
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)  # the first test waits for the ranks


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The runs of `experts_reference` and `experts_ranks`."""
    return outcome_of("experts", request, tmp_path_factory, slow_argument="everything", backends=("megatron",))


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("model", MODELS)
class TestAgainstPlainTorch:
    def test_loaded_weights_give_the_logits_of_transformers(self, outcome: Outcome, layout: str, model: str) -> None:
        assert outcome.logit_error(layout, model) <= 1e-5

    def test_exported_weights_are_those_loaded_bit_for_bit(self, outcome: Outcome, layout: str, model: str) -> None:
        assert "lm_head.weight" in outcome.weights(f"{model}/model.safetensors")
        outcome.check_exported(layout, model)

    def test_training_follows_the_float64_reference(self, outcome: Outcome, layout: str, model: str) -> None:
        _check_training(outcome, layout, model, "plain")

    def test_routers_report_what_the_reference_counts(self, outcome: Outcome, layout: str, model: str) -> None:
        found, expected = outcome.layouts[layout][model]["plain"][0], outcome.reference[model]["plain"]["routers"][0]
        # the padding of rows that ranks share counts too, and the prompt of a group that four ranks divide counts once more
        tolerance = 1e-5 if layout in ("one", "ep", "ep_pp") else 0.1
        assert [found[name] for name in FIGURES] == pytest.approx([expected[name] for name in FIGURES], rel=tolerance)
        assert found["router_balance_loss"] >= 0.95


@pytest.mark.parametrize("model", MODELS)
def test_the_load_balancing_loss_adds_its_gradient_as_in_the_float64_reference(outcome: Outcome, model: str) -> None:
    _check_training(outcome, "one", model, "balanced")
    for found, expected in zip(
        outcome.layouts["one"][model]["balanced"], outcome.reference[model]["balanced"]["routers"], strict=True
    ):
        assert found["router_balance_loss"] == pytest.approx(expected["router_balance_loss"], rel=1e-5)
    plain, balanced = (outcome.reference[model][way]["grad_norm"] for way in ("plain", "balanced"))
    assert plain != pytest.approx(balanced, rel=1e-4), "a loss that does nothing"


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
class TestLayouts:
    def test_a_step_does_not_depend_on_rows_micro_batches_recomputation_or_ranks(
        self, outcome: Outcome, layout: str
    ) -> None:
        source, expected = (
            outcome.weights(name) for name in ("qwen3_moe/model.safetensors", "out/one.split0.safetensors")
        )
        base = outcome.layouts["one"]["split"][0]
        for i, stats in enumerate(outcome.layouts[layout]["split"]):
            assert stats["loss"] == pytest.approx(base["loss"], rel=0.0, abs=1e-6)
            assert stats["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-6)
            assert update_error(outcome.weights(f"out/{layout}.split{i}.safetensors"), expected, source) < 3e-6

    def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(self, outcome: Outcome, layout: str) -> None:
        for said in outcome.layouts[layout]["resume"].values():
            assert said == {"steps": 1, "stats": True, "weights": True, "random": True, "moved": True}

    def test_a_run_goes_on_from_the_checkpoint_of_another_layout(self, outcome: Outcome, layout: str) -> None:
        said = outcome.layouts[layout]["loaded"]
        if LAYOUTS[layout] == 1:
            assert not said
            return
        losses = [found["stats"]["loss"] for found in said.values()]
        norms = [found["stats"]["grad_norm"] for found in said.values()]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=0.0, abs=1e-6)
        assert norms == pytest.approx([norms[0]] * len(norms), rel=2e-6)
        assert all(found["same"] and found["stats"]["skipped"] == "" for found in said.values())


def _check_training(outcome: Outcome, layout: str, model: str, way: str) -> None:
    stats, reference = outcome.layouts[layout][model][way], outcome.reference[model][way]
    assert [s["loss"] for s in stats] == pytest.approx(reference["loss"], rel=0.0, abs=1e-6)
    assert [s["grad_norm"] for s in stats] == pytest.approx(reference["grad_norm"], rel=2e-6)
    trained = outcome.weights(f"out/{layout}.{model}.{way}.safetensors")
    expected = outcome.weights(f"{model}.{way}/model.safetensors")
    source = outcome.weights(f"{model}/model.safetensors")
    assert update_error(trained, expected, source, least=0.1) < 4e-6
