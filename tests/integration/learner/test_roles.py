"""Actor, critic and reference on either back end against plain transformers and torch; and what a job keeps of them when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.learner.rank_runs import TIMEOUT_S, Outcome, outcome_of
from tests.integration.learner.roles_cases import ACTOR, CASES, CRITIC, DTYPES, QUICK_DTYPES, STEPS
from tests.integration.learner.test_trainer import update_error
from tests.integration.learner.trainer_cases import LAYOUTS, QUICK

HERE = Path(__file__).parent
EVERY_LAYOUT = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAYOUTS]
SAVED = [
    pytest.param(
        name, dtype, marks=[pytest.mark.slow] * (name not in QUICK or (name != "one" and dtype not in QUICK_DTYPES))
    )
    for name in LAYOUTS
    for dtype in DTYPES
]
ACCUMULATED = ("grad_norm", "importance_weight", "max_abs_logprob_difference")
"""Figures that are no means of single tokens' log-probs or losses: they amplify or add up the rounding of many."""
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)  # the first test waits for the ranks


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The runs of `roles_reference` and `roles_ranks`."""
    return outcome_of("roles", request, tmp_path_factory, slow_argument="everything")


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
class TestAgainstPlainTorch:
    def test_every_figure_of_a_step_is_that_of_the_float64_reference(self, outcome: Outcome, layout: str) -> None:
        trained = outcome.layouts[layout]["trained"]
        assert len(trained) >= 3
        for name, said in trained.items():
            case, model, _ = name.split()
            expected = outcome.reference[model][case]
            assert len(said["records"]) == len(expected) == STEPS
            for found, wanted in zip(said["records"], expected, strict=True):
                assert found["skipped"] == ""
                for figure, value in wanted.items():
                    # float32 against float64, after up to twelve optimizer steps; token losses are of order 1 and cancel in a mean
                    tolerance = 1e-5 if figure.endswith(ACCUMULATED) else 2e-6
                    close = pytest.approx(value, rel=tolerance, abs=2e-6)
                    assert found[figure] == close, (name, found["optimizer_step"], figure)

    def test_trained_weights_of_actor_and_critic_are_those_of_the_float64_reference(
        self, outcome: Outcome, layout: str
    ) -> None:
        for name in outcome.layouts[layout]["trained"]:
            case, model, way = name.split()
            for role in ("actor", "critic") if "critic" in CASES[case] else ("actor",):
                found = outcome.weights(f"out/{layout}.{model}.{case}.{way}.{role}.safetensors")
                expected = outcome.weights(f"{model}.{case}.{role}.safetensors")
                source = outcome.weights(f"{model}{'' if role == 'actor' else '-critic'}/model.safetensors")
                if role == "critic":
                    source["lm_head.weight"] = torch.zeros_like(expected["lm_head.weight"])
                assert found.keys() == expected.keys() | {"lm_head.weight"}
                # rounding the weights, and 1 - rate * decay, to float32 in each of twelve optimizer steps is 1e-5 of the change
                assert update_error(found, expected, source, least=0.1) < 2e-5, (name, role)
                assert all(torch.allclose(found[k].double(), expected[k], rtol=1e-6, atol=1e-6) for k in expected), name

    def test_copies_of_a_parameter_stay_equal_bit_for_bit_on_all_ranks(self, outcome: Outcome, layout: str) -> None:
        for name, said in outcome.layouts[layout]["trained"].items():
            assert said["copies_differ"] == [], name


class TestTheReference:
    """The cases reach what they are there for: a figure that is always 0 would prove nothing."""

    @pytest.mark.parametrize("model", ["llama", "qwen2"])
    def test_every_clip_mask_and_penalty_of_a_case_acts(self, outcome: Outcome, model: str) -> None:
        acts = {
            "ppo": ("clip_fraction_high", "clip_fraction_low", "value_clip_fraction", "reference_kl", "explained_variance"),
            "grpo": ("clip_fraction_high", "clip_fraction_low", "reference_kl"),
            "m2po": ("mask_fraction_positive", "mask_fraction_negative", "clip_fraction_high"),
            "interpolated": ("clip_fraction_high", "clip_fraction_low"),
            "rloo": ("clip_fraction_high", "reference_kl"),
        }  # fmt: skip
        for case, figures in acts.items():
            records = outcome.reference[model][case]
            assert all(any(abs(record[figure]) > 1e-3 for record in records) for figure in figures), case
        coefficients = [record["kl_coefficient"] for record in outcome.reference[model]["ppo"]]
        assert len(set(coefficients)) == STEPS, "the coefficient adapts"


def test_each_role_follows_a_schedule_of_its_own(outcome: Outcome) -> None:
    for said in outcome.layouts["one"]["trained"].values():
        rates = [record["lr"] for record in said["records"]]
        assert rates[:2] == [ACTOR["lr"] / 2, ACTOR["lr"]]
        assert ACTOR["lr"] * ACTOR["lr_min_ratio"] < rates[2] < ACTOR["lr"]
    rates = [record["critic_lr"] for record in outcome.layouts["one"]["trained"]["ppo llama rows"]["records"]]
    assert rates[:2] == [CRITIC["lr"] / 2, CRITIC["lr"]]
    assert rates[2] == pytest.approx(CRITIC["lr"] * (1 - 0.8 / 6))


@pytest.mark.parametrize(("layout", "dtype"), SAVED)
class TestContinuing:
    def test_save_load_continue_is_the_uninterrupted_run_bit_for_bit(
        self, outcome: Outcome, layout: str, dtype: str
    ) -> None:
        said = outcome.layouts[layout]["continued"][dtype]
        assert all(said.values()), said
        assert len(said) == 5

    def test_roles_that_a_checkpoint_lacks_begin_with_the_actors_weights_or_with_their_own_directory(
        self, outcome: Outcome, layout: str, dtype: str
    ) -> None:
        said = outcome.layouts[layout]["begun"][dtype]
        for way in ("load", "no_load_optim", "finetune"):
            assert all(said[way].values()), (way, said[way])
            assert len(said[way]) == 8

    def test_a_checkpoint_holds_the_actor_under_the_same_names_with_roles_and_without(
        self, outcome: Outcome, layout: str, dtype: str
    ) -> None:
        said = outcome.layouts[layout]["begun"][dtype]
        assert (said["unprefixed"], said["names"], said["back"]) == (True, True, True)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
class TestSteps:
    def test_the_critics_warm_up_leaves_the_actor_as_it_is(self, outcome: Outcome, layout: str) -> None:
        *warm_up, after = outcome.layouts[layout]["warm_up"]
        assert len(warm_up) == 2
        for step in warm_up:
            record = step["record"]
            assert step["changed"] == ["critic"]
            assert (record["loss"], record["grad_norm"], record["skipped"]) == (None, None, "")
            assert record["optimizer_steps"] == 0
            assert record["value_loss"] > 0 < record["critic_grad_norm"]
            assert record["lr"] > 0
        assert after["changed"] == ["critic", "model", "optimizer"]
        assert after["record"]["grad_norm"] > 0

    def test_a_critic_that_is_not_finite_changes_nothing_on_any_rank(self, outcome: Outcome, layout: str) -> None:
        said = outcome.layouts[layout]["broken"]
        assert len(said["skips"]) == LAYOUTS[layout]
        assert set(said["skips"]) == {said["record"]["skipped"]}
        assert "not both finite" in said["record"]["skipped"]
        assert said["unchanged"]
        assert said["record"]["value_loss"] is None

    def test_a_step_without_a_token_changes_nothing_but_lets_a_due_reference_follow(
        self, outcome: Outcome, layout: str
    ) -> None:
        said = outcome.layouts[layout]["no token"]
        assert said == {"skipped": "no token to train on", "roles": ["reference"], "follows": True}
