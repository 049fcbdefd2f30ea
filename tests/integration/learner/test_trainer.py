"""Either back end against plain transformers and torch: the same logits, losses and weights, however the work is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learner.platforms import ON_CPU
from tests.integration.learner.rank_runs import TIMEOUT_S, Outcome, outcome_of
from tests.integration.learner.trainer_cases import (
    LAYOUTS,
    LONG,
    MODELS,
    ON_FSDP2,
    QUICK,
    SHORT,
    STEPS,
    TEMPERATURE,
    WARMUP_STEPS,
    arrays,
)

HERE = Path(__file__).parent
OTHER_SUMS = ("tp", "sp", "cp", "sp_pp", "sp_dist", "cp_sp", "cp_pp", "cp_dp")
EVERY_LAYOUT = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAYOUTS]
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)  # the first test waits for the ranks


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The runs of `trainer_reference` and `trainer_ranks`."""
    return outcome_of("trainer", request, tmp_path_factory, slow_argument="everything")


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("model", MODELS)
class TestAgainstPlainTorch:
    def test_loaded_weights_give_the_logits_of_transformers(self, outcome: Outcome, layout: str, model: str) -> None:
        # sums over the halves of a weight, or of a row, round differently, and FSDP2 has another attention; the rest computes the very same
        assert outcome.logit_error(layout, model) <= (0.0 if ON_CPU and layout not in OTHER_SUMS + ON_FSDP2 else 1e-5)

    def test_exported_weights_are_those_loaded_and_name_the_output_layer(
        self, outcome: Outcome, layout: str, model: str
    ) -> None:
        outcome.check_exported(layout, model)

    def test_a_saved_directory_is_the_loaded_one(self, outcome: Outcome, layout: str, model: str) -> None:
        saved = outcome.root / "out" / f"{layout}.{model}.saved" / "hf"
        source = outcome.weights(f"{model}/model.safetensors")
        written = load_file(saved / "model.safetensors")
        assert written.keys() == source.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in source.items())
        assert (saved / "config.json").read_text() == (outcome.root / model / "config.json").read_text()
        assert (saved / "tokenizer.json").is_file()

    @pytest.mark.parametrize("way", ["rows", "shared"])
    def test_training_follows_the_float64_reference(self, outcome: Outcome, layout: str, model: str, way: str) -> None:
        stats, reference = outcome.layouts[layout][model][way], outcome.reference[model]
        # token losses are of order 1 and cancel in the mean: 1e-6 is relative to them
        assert [s["loss"] for s in stats] == pytest.approx(reference["loss"], rel=0.0, abs=1e-6)
        assert [s["grad_norm"] for s in stats] == pytest.approx(reference["grad_norm"], rel=2e-6)
        trained = outcome.weights(f"out/{layout}.{model}.{way}.safetensors")
        expected = outcome.weights(f"{model}.trained.safetensors")
        source = outcome.weights(f"{model}/model.safetensors")
        assert all(torch.allclose(trained[k].double(), expected[k], rtol=1e-6, atol=1e-6) for k in expected)
        assert update_error(trained, expected, source) < 4e-6
        assert torch.equal(trained["lm_head.weight"], trained["model.embed_tokens.weight"]) is (model != "qwen2")


def update_error(
    weights: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    source: dict[str, torch.Tensor],
    least: float = 1.0,
) -> float:
    """Norm of the difference over norm of the expected change, whose square must be above `least`."""
    wrong = sum(float((weights[k].double() - expected[k].double()).square().sum()) for k in source)
    change = sum(float((expected[k].double() - source[k].double()).square().sum()) for k in source)
    assert change > least
    return float((wrong / change) ** 0.5)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
class TestSplitting:
    def test_a_step_does_not_depend_on_micro_batches_padding_packing_or_ranks(
        self, outcome: Outcome, layout: str
    ) -> None:
        source = outcome.weights("llama/model.safetensors")
        expected = outcome.weights("out/one.split0.safetensors")
        base = outcome.layouts["one"]["splits"][0]
        splits = outcome.layouts[layout]["splits"]
        # with context parallelism a micro-batch is one row, packed or not, and on FSDP2 there is no padding
        ways = {(s["micro_batches"], s["padding_share"]) for s in splits}
        assert len(ways) >= (3 if layout in ON_FSDP2 else 6 if layout.startswith("cp") else 7), (
            "the splits should differ"
        )
        for i, stats in enumerate(splits):
            assert stats["loss"] == pytest.approx(base["loss"], rel=0.0, abs=1e-6)
            assert stats["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-6)
            assert update_error(outcome.weights(f"out/{layout}.split{i}.safetensors"), expected, source) < 3e-6

    def test_recomputed_activations_give_the_same_gradients(self, outcome: Outcome, layout: str) -> None:
        source = outcome.weights("llama/model.safetensors")
        expected = outcome.weights("out/one.split0.safetensors")
        base = outcome.layouts["one"]["splits"][0]
        for i, stats in enumerate(outcome.layouts[layout]["recomputed"]):
            assert stats["loss"] == pytest.approx(base["loss"], rel=0.0, abs=1e-6)
            assert stats["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-6)
            found = outcome.weights(f"out/{layout}.recomputed{i}.safetensors")
            assert update_error(found, expected, source) < 3e-6

    def test_metrics_are_means_over_the_tokens_of_the_global_batch(self, outcome: Outcome, layout: str) -> None:
        batch = arrays()
        kept = np.concatenate([np.asarray(item["advantage"])[np.asarray(item["loss_mask"])] for item in batch])
        base = outcome.layouts["one"]["splits"][0]
        for stats in outcome.layouts[layout]["splits"]:
            assert stats["loss_tokens"] == len(kept)
            assert stats["advantage"] == pytest.approx(float(kept.astype(np.float64).mean()), rel=1e-6)
            assert stats["ordered"] == 1.0
            for name in (
                "entropy",
                "mismatch_kl_k1",
                "mismatch_kl_k3",
                "max_abs_logprob_difference",
                "effective_sample_share",
            ):
                assert stats[name] == pytest.approx(base[name], rel=1e-5), name

    def test_an_empty_rank_takes_part(self, outcome: Outcome, layout: str) -> None:
        stats = outcome.layouts[layout]["lonely"]
        assert (stats["sequences"], stats["skipped"]) == (1, "")
        assert stats["loss"] == pytest.approx(outcome.layouts["one"]["lonely"]["loss"], rel=1e-6)
        assert stats["grad_norm"] == pytest.approx(outcome.layouts["one"]["lonely"]["grad_norm"], rel=1e-6)

    @pytest.mark.parametrize("way", ["logprobs", "shared_logprobs"])
    def test_logprobs_come_in_the_order_of_the_sequences(self, outcome: Outcome, layout: str, way: str) -> None:
        logits = outcome.weights("llama.logits.safetensors")
        for i, (item, found) in enumerate(zip(arrays(), outcome.layouts[layout][way], strict=True)):
            tokens, prompt = torch.from_numpy(np.asarray(item["tokens"])).long(), int(item["prompt_len"])
            rows = torch.log_softmax(logits[str(i)].double()[prompt - 1 :] / TEMPERATURE, -1)
            expected = rows.gather(-1, tokens[prompt:, None])[:, 0]
            assert found == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.skipif(not ON_CPU, reason="torch's fused kernels on a GPU take no float32")
class TestMemory:
    @pytest.mark.parametrize("way", ["rows", "shared"])
    def test_it_grows_with_a_rows_length_and_not_with_its_square(self, outcome: Outcome, way: str) -> None:
        short, long = outcome.layouts["one"]["memory"][way]
        factor = LONG / SHORT
        # a mask of one byte a pair of positions would make it 5
        assert long["peak"] < 1.1 * factor * short["peak"]
        assert long["largest"] < 1.1 * factor * short["largest"]
        assert long["largest"] < LONG**2 / 4

    @pytest.mark.slow
    def test_it_is_less_where_positions_are_split_over_ranks(self, outcome: Outcome) -> None:
        whole, split = (outcome.layouts[layout]["memory"]["shared"][0]["peak"] for layout in ("tp", "sp"))
        assert split < 0.85 * whole

    def test_half_a_row_takes_little_more_than_half_of_it(self, outcome: Outcome) -> None:
        whole, split = (outcome.layouts[layout]["memory"]["shared"][0]["peak"] for layout in ("one", "cp"))
        assert split < 0.65 * whole


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
class TestContinuing:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_save_load_continue_is_the_uninterrupted_run_bit_for_bit(
        self, outcome: Outcome, layout: str, dtype: str
    ) -> None:
        said = outcome.layouts[layout]["resume"][dtype]
        assert said == {"steps": 1, "stats": True, "weights": True, "random": True, "moved": True}

    @pytest.mark.parametrize("kind", ["broken", "broken_gradient"])
    def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(
        self, outcome: Outcome, layout: str, kind: str
    ) -> None:
        said = outcome.layouts[layout][kind]
        assert "not both finite" in said["bad"]["skipped"]
        assert set(said["skips"]) == {said["bad"]["skipped"]}
        assert (said["bad"]["loss"] is None) is (kind == "broken")
        assert said["bad"]["grad_norm"] is None
        assert said["unchanged"]
        assert said["good"]["skipped"] == ""
        assert said["good"]["loss"] == pytest.approx(outcome.layouts["one"]["splits"][0]["loss"], rel=0.0, abs=1e-6)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_what_is_loaded_of_a_checkpoint_is_what_was_asked_for(
        self, outcome: Outcome, layout: str, dtype: str
    ) -> None:
        said = outcome.layouts[layout]["beginnings"][dtype]
        # qwen3 is stored in float32, so its export is exact from float32 parameters and from bfloat16 ones
        expected = {
            "no_load_optim": {"step": 1, "optimizer": False, "random": True},
            "no_load_rng": {"step": 1, "optimizer": True, "random": False},
            "finetune": {"step": 0, "optimizer": False, "random": False},
            "hugging_face": {"step": 0, "optimizer": False, "random": False},
        }
        for kind, facts in expected.items():
            wanted = {"weights": True, "trains": True, "fresh_optimizer": not facts["optimizer"], **facts}
            assert said[kind] == wanted, kind

    def test_a_checkpoint_of_another_kind_is_refused_by_name(self, outcome: Outcome, layout: str) -> None:
        refused = outcome.layouts[layout]["refused"]
        if layout in ON_FSDP2:
            assert (
                "saved by backend megatron, and learner.backend is fsdp2: begin from its Hugging Face directory"
                in refused
            )
            return
        assert "rank-00000.safetensors: saved with dtype = float32, and now it is bfloat16" in refused

    @pytest.mark.parametrize("model", ["llama", "qwen2"])  # tied, and not
    def test_an_fp32_output_layer_rounds_no_logit_of_a_bfloat16_model(
        self, outcome: Outcome, layout: str, model: str
    ) -> None:
        coarse, fine = outcome.layouts[layout]["output_layer"][model]
        assert coarse["rounded"] == 0.0 < fine["rounded"]
        assert fine["error"] < 1e-5
        assert coarse["error"] > 1e-3
        assert fine["grad_norm"] == pytest.approx(coarse["grad_norm"], rel=0.05)
        assert fine["loss"] != coarse["loss"]

    def test_the_rate_warms_up(self, outcome: Outcome, layout: str) -> None:
        rates = [s["lr"] for s in outcome.layouts[layout]["llama"]["rows"]]
        assert rates == [1.0 * step / WARMUP_STEPS for step in range(1, STEPS + 1)]
