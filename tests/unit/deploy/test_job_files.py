"""The job files that people start from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.cli.overrides import load_job
from services.common.config.settings import Settings
from services.common.models.directory import ModelInfo, check_parallel_sizes
from services.common.spec.choices import ImportanceCorrection, Preset
from services.common.spec.job import JobSpec, parse_spec, spec_schema
from services.learner.ranks.launch import Nodes

JOBS = sorted((Path(__file__).parents[3] / "deploy/config/jobs").rglob("*.yaml"))
QWEN_2_5_32B = ModelInfo(
    "Qwen2ForCausalLM",
    num_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    hidden_size=5120,
    intermediate_size=27_648,
    vocab_size=152_064,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_job_file_is_a_valid_spec(path: Path) -> None:
    assert parse_spec(path.read_text()).name


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_job_file_leads_editors_to_the_schema_of_this_release(path: Path) -> None:
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    assert found, "the first line names the schema"
    schema = json.loads((path.parent / found[1]).read_text())
    assert schema == spec_schema(), "run: millrace schema > deploy/config/job.schema.json"
    assert schema["$id"] == "urn:millrace:job-spec"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_changes_that_a_job_files_head_names_make_a_valid_spec(path: Path) -> None:
    changes = re.findall(r"^#.*?--set .*$", path.read_text(), re.MULTILINE)
    settings = [change for line in changes for change in re.findall(r"--set (\S+=\S+)", line)]
    assert JobSpec.model_validate(load_job(path, settings)).name


RECIPES = {path.stem: path for path in JOBS if path.parent.name == "recipes"}


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_the_algorithm_that_its_name_says(path: Path) -> None:
    spec = parse_spec(path.read_text())
    preset = Preset.DAPO if path.stem == "masked" else Preset(path.stem.replace("-", "_"))
    assert spec.name == path.stem
    assert spec.algorithm.preset == preset
    assert (spec.algorithm.importance_correction is ImportanceCorrection.MASKED) is (path.stem == "masked")
    assert (spec.reference is not None) is spec.algorithm.wants_reference


def test_every_preset_without_a_critic_has_a_recipe() -> None:
    others = {Preset.PPO, Preset.REINFORCE_PLUS_PLUS_BASELINE}
    assert RECIPES.keys() == {preset.replace("_", "-") for preset in set(Preset) - others} | {"masked"}


def test_the_ppo_job_is_verls_example_and_its_smaller_form_keeps_four_optimizer_steps_a_batch() -> None:
    path = next(path for path in JOBS if path.stem == "ppo-gsm8k-smollm2")
    spec = parse_spec(path.read_text())
    assert (spec.algorithm.advantage_estimator, spec.algorithm.lam, spec.algorithm.kl_coefficient) == ("gae", 1.0, 1e-3)
    assert spec.critic is not None
    assert (spec.learner.lr, spec.critic.lr, spec.critic.value_clip) == (1e-6, 1e-5, 0.5)
    changes = re.findall(r"--set (\S+=\d\S*)", path.read_text())
    smaller = JobSpec.model_validate(load_job(path, changes))
    for job in (spec, smaller):
        assert job.algorithm.groups_per_step == 4 * (job.learner.mini_batch_size or 0)
    assert (smaller.learner.steps, smaller.rollout.rollout_max_tokens) == (2, 96)


def test_the_ascend_job_divides_its_model_and_its_machines() -> None:
    spec = parse_spec(next(path for path in JOBS if path.stem == "qwen2.5-32b-ascend").read_text())
    check_parallel_sizes(QWEN_2_5_32B, spec)
    settings = Settings(worker="learner", learner_nodes=2, learner_rendezvous="10.0.0.1:29400")
    assert Nodes.of(settings).ranks_here(spec.learner.world_size) == 8, "an A3 machine gives the learner 8 NPUs"
