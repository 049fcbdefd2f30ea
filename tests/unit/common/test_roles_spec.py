"""Presets and roles of a job's spec: what a preset sets, what wins over it, and which roles each needs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import ConfigError
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator, KlEstimator, KlPlacement, LossName, Preset, ProximalPolicy
from services.common.spec.job import JobSpec, dump_spec, parse_recorded_spec, parse_spec
from services.common.spec.presets import DIVIDE_BY_LONGEST, PRESETS

SMALL: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"train": {"source": "tasks.jsonl"}}}
ROLES: dict[str, Any] = {"critic": {}, "reference": {}}
WITH_CRITIC = frozenset({Preset.PPO})
WITH_REFERENCE = frozenset(
    {
        Preset.GRPO,
        Preset.RLOO,
        Preset.REINFORCE_PLUS_PLUS,
        Preset.REINFORCE_PLUS_PLUS_BASELINE,
        Preset.PPO,
    }
)
OLD: dict[str, dict[str, Any]] = {
    "model": {"path": "tiny"},
    "data": {"train": {"source": "tasks.jsonl"}},
    "rollout": {"group_size": 8, "rollout_max_tokens": 512},
    "algorithm": {
        "advantage_estimator": "grpo", "loss": "dapo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "dual_clip": None,
        "token_level_loss": True, "constant_length": None, "importance_correction": "truncated", "importance_weight_cap": 2.0,
        "filter_groups_enable": True, "filter_groups_train_batch_size": 64,
    },
    "learner": {"steps": 100, "lr": 0.001, "lr_warmup_steps": 10, "packing": True},
}  # fmt: skip
"""As a release without presets, roles and several optimizer steps a batch wrote it down."""


def roles_of(preset: Preset) -> dict[str, Any]:
    sections: dict[str, Any] = {"critic": {}} if preset in WITH_CRITIC else {}
    return sections | ({"reference": {}} if preset in WITH_REFERENCE else {})


def job(**sections: Any) -> JobSpec:
    return parse_spec(json.dumps(SMALL | sections))


def refusal(**sections: Any) -> tuple[str, str]:
    """The only problem's field and message."""
    with pytest.raises(ConfigError) as caught:
        job(**sections)
    [problem] = caught.value.problems
    return problem.field, problem.message


@pytest.mark.parametrize("preset", list(Preset))
def test_every_preset_is_a_whole_job_and_reads_back_equal(preset: Preset) -> None:
    spec = job(algorithm={"preset": preset}, **roles_of(preset))
    assert parse_recorded_spec(dump_spec(spec)) == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    for name, value in PRESETS[preset].items():
        assert getattr(spec.algorithm, name) == value


@pytest.mark.parametrize("preset", list(Preset))
def test_a_record_does_not_depend_on_what_its_preset_says_later(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(algorithm={"preset": preset}, **roles_of(preset))
    record = dump_spec(spec)
    later = {preset: dict(PRESETS[preset]) | {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0, "gamma": 0.5}}
    monkeypatch.setattr("services.common.spec.algorithm.PRESETS", later)
    assert parse_recorded_spec(record) == spec
    assert job(algorithm={"preset": preset}, **roles_of(preset)).algorithm.gamma == 0.5


@pytest.mark.parametrize("preset", list(Preset))
def test_a_preset_needs_exactly_the_roles_that_it_is_documented_to_need(preset: Preset) -> None:
    needed = roles_of(preset)
    for role in needed:
        rest = {name: section for name, section in needed.items() if name != role}
        with pytest.raises(ConfigError, match=f"add a section {role}"):
            job(algorithm={"preset": preset}, **rest)
    if preset not in WITH_CRITIC:
        assert refusal(algorithm={"preset": preset}, **ROLES)[0] == "critic"


@pytest.mark.parametrize("preset", [preset for preset in Preset if PRESETS[preset]])
def test_a_field_that_the_job_sets_wins_over_its_preset(preset: Preset) -> None:
    own = {"clip_ratio_low": 0.11, "clip_ratio_high": 0.12, "filter_groups_max_batches": 3}
    algorithm = job(algorithm={"preset": preset} | own, **roles_of(preset)).algorithm
    assert {name: getattr(algorithm, name) for name in own} == own
    others = {name: value for name, value in PRESETS[preset].items() if name not in own}
    assert {name: getattr(algorithm, name) for name in others} == others


def test_each_field_of_a_preset_can_be_set_by_the_job() -> None:
    own = {
        "lam": 0.5, "kl_coefficient": 0.25, "kl_estimator": "k3", "kl_placement": "loss", "filter_groups_enable": True,
        "proximal_policy": "interpolated",
    }  # fmt: skip
    algorithm = job(algorithm={"preset": "ppo"} | own, **ROLES).algorithm
    assert {name: getattr(algorithm, name) for name in own} == own
    assert algorithm.advantage_estimator is AdvantageEstimator.GAE, "the rest stays the preset's"


@pytest.mark.parametrize("preset", sorted(DIVIDE_BY_LONGEST))
def test_a_sum_over_tokens_is_divided_by_the_jobs_longest_response(preset: Preset) -> None:
    roles = roles_of(preset)
    assert job(algorithm={"preset": preset}, **roles).algorithm.constant_length == 512
    shorter = {"rollout_max_tokens": 96}
    assert job(algorithm={"preset": preset}, rollout=shorter, **roles).algorithm.constant_length == 96
    own = {"preset": preset, "constant_length": 1000}
    assert job(algorithm=own, rollout=shorter, **roles).algorithm.constant_length == 1000
    tokens = {"preset": preset, "token_level_loss": True}
    assert job(algorithm=tokens, rollout=shorter, **roles).algorithm.constant_length is None


def test_only_those_presets_divide_by_a_constant() -> None:
    for preset in set(Preset) - DIVIDE_BY_LONGEST:
        assert job(algorithm={"preset": preset}, **roles_of(preset)).algorithm.constant_length is None


def test_without_a_preset_the_values_are_dapos() -> None:
    named, plain = AlgorithmSpec(preset=Preset.DAPO), AlgorithmSpec()
    assert named.model_dump(exclude={"preset"}) == plain.model_dump(exclude={"preset"})


def test_ppo_is_clipped_against_the_policy_that_sampled_with_values_and_a_kl_in_the_reward() -> None:
    algorithm = job(algorithm={"preset": "ppo"}, **ROLES).algorithm
    assert (algorithm.advantage_estimator, algorithm.gamma, algorithm.lam) == (AdvantageEstimator.GAE, 1.0, 0.95)
    assert (algorithm.loss, algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (LossName.DAPO, 0.2, 0.2)
    assert (algorithm.kl_placement, algorithm.kl_estimator) == (KlPlacement.REWARD, KlEstimator.K1)
    assert algorithm.proximal_policy is ProximalPolicy.INFERENCE
    assert not algorithm.filter_groups_enable, "a group whose rewards are equal carries an advantage too"


@pytest.mark.parametrize(
    ("sections", "field", "other"),
    [
        ({"algorithm": {"advantage_estimator": "gae"}}, "algorithm.advantage_estimator", "section critic"),
        ({"critic": {}}, "critic", "algorithm.advantage_estimator grpo"),
        ({"algorithm": {"advantage_estimator": "rloo"}, "critic": {}}, "critic", "algorithm.advantage_estimator rloo"),
        ({"algorithm": {"kl_coefficient": 0.1}}, "algorithm.kl_coefficient", "section reference"),
        ({"algorithm": {"preset": "grpo"}}, "algorithm.kl_coefficient", "section reference"),
        (
            {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 7}, "reference": {}, "learner": {"steps": 7}},
            "critic.warmup_steps",
            "learner.steps (7)",
        ),
        ({"rollout": {"group_size": 1}}, "rollout.group_size", "algorithm.advantage_estimator grpo"),
        (
            {"rollout": {"group_size": 4, "min_group_size": 1}},
            "rollout.min_group_size",
            "algorithm.advantage_estimator grpo",
        ),
        (
            {
                "rollout": {"group_size": 1},
                "algorithm": {"preset": "ppo", "filter_groups_enable": True},
                "critic": {},
                "reference": {},
            },
            "rollout.group_size",
            "algorithm.filter_groups_enable",
        ),
        (
            {"learner": {"mini_batch_size": 48}},
            "learner.mini_batch_size",
            "algorithm.filter_groups_train_batch_size (64)",
        ),
        (
            {"learner": {"mini_batch_size": 128}},
            "learner.mini_batch_size",
            "algorithm.filter_groups_train_batch_size (64)",
        ),
        ({"eval": {"enabled": True}}, "eval.enabled", "data.eval"),
        (
            {"algorithm": {"overlong_buffer_enable": True}, "rollout": {"rollout_max_tokens": 64}},
            "algorithm.overlong_buffer",
            "rollout.rollout_max_tokens (64)",
        ),
        ({"model": {"path": "tiny", "max_model_len": 512}}, "model.max_model_len", "rollout.rollout_max_tokens (512)"),
    ],
)
def test_sections_that_do_not_agree_are_a_problem_of_one_field_that_names_the_other(
    sections: dict[str, Any], field: str, other: str
) -> None:
    found, message = refusal(**sections)
    assert found == field
    assert other in message
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(SMALL | sections)
    assert field in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("algorithm.preset", "grppo"),
        ("algorithm.gamma", 1.1),
        ("algorithm.lam", -0.1),
        ("algorithm.advantage_clip", 0.0),
        ("algorithm.kl_estimator", "k4"),
        ("algorithm.kl_placement", "both"),
        ("algorithm.kl_target", 0.0),
        ("algorithm.kl_horizon", 0),
        ("algorithm.entropy_coefficient", -1.0),
        ("critic.path", ""),
        ("critic.value_clip", 0.0),
        ("critic.lr", 0.0),
        ("critic.placement", "elsewhere"),
        ("reference.rebase_interval_steps", 0),
        ("reference.lr", 1e-6),
        ("learner.ppo_epochs", 0),
        ("learner.mini_batch_size", 0),
        ("learner.lr_schedule", "step"),
        ("learner.lr_min_ratio", 1.1),
        ("learner.lr_warmup_share", 1.0),
    ],
)
def test_a_value_out_of_range_is_named(path: str, value: object) -> None:
    section, _, name = path.partition(".")
    found, _ = refusal(**{section: {name: value}})
    assert found == path


def test_a_group_of_one_is_enough_where_nothing_is_compared() -> None:
    one = {"group_size": 1}
    assert job(algorithm={"preset": "ppo"}, rollout=one, **ROLES).rollout.fewest_rollouts == 1
    alone = {"preset": "reinforce_plus_plus"}
    assert job(algorithm=alone, rollout=one, reference={}).rollout.fewest_rollouts == 1


def test_a_critic_serves_an_installed_estimator_too() -> None:
    assert job(algorithm={"advantage_estimator": "my_estimator"}, critic={}).critic is not None


def test_a_reference_without_a_coefficient_is_allowed_it_is_only_measured() -> None:
    spec = job(reference={})
    assert (spec.algorithm.kl_coefficient, spec.algorithm.wants_reference) == (0.0, False)


def test_a_recorded_spec_without_presets_and_roles_keeps_its_values() -> None:
    spec = parse_recorded_spec(json.dumps(OLD))
    assert (spec.critic, spec.reference, spec.algorithm.preset) == (None, None, None)
    assert (spec.learner.ppo_epochs, spec.learner.mini_batch_size) == (1, None)
    assert (spec.learner.lr_schedule, spec.learner.lr_warmup_share) == ("constant", None)
    assert (spec.algorithm.revision, spec.algorithm.kl_coefficient, spec.algorithm.entropy_coefficient) == (1, 0.0, 0.0)
    recorded = spec.model_dump(mode="json")
    for section, values in OLD.items():
        for name, value in values.items():
            if section != "data":
                assert recorded[section][name] == value
    assert parse_recorded_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize(
    ("placements", "pools"),
    [
        (("actor", "actor"), [["", "critic", "reference"]]),
        (("own", "actor"), [["", "reference"], ["critic"]]),
        (("actor", "own"), [["", "critic"], ["reference"]]),
        (("own", "own"), [[""], ["critic"], ["reference"]]),
    ],
)
def test_a_role_of_its_own_placement_adds_as_many_ranks_as_the_actor_has(
    placements: tuple[str, str], pools: list[list[str]]
) -> None:
    critic, reference = ({"placement": placement} for placement in placements)
    spec = job(
        algorithm={"preset": "ppo"},
        critic=critic,
        reference=reference,
        learner={"tensor_parallel_size": 2, "data_parallel_size": 3},
    )
    assert spec.pools == pools
    assert (spec.learner.world_size, spec.world_size) == (6, 6 * len(pools))


def test_a_job_without_roles_has_the_actors_ranks_alone() -> None:
    assert job().pools == [[""]]
    assert job().world_size == 1
