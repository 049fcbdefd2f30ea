"""Choice of the quick unit tests: where torch is not installed (`make test-unit`), the others are left out."""

from __future__ import annotations

from importlib.util import find_spec

HEAVY = (
    "benchmarks/test_tracker_outage.py", "learner/conversion/test_report.py", "learner/training/test_batch.py",
    "learner/training/test_context_parallel.py", "learner/training/test_cuda_attention.py", "learner/training/test_episodes.py",
    "learner/training/test_logprobs.py", "learner/training/test_micro_batches.py", "learner/training/test_npu_attention.py",
    "learner/training/test_prompt_sharing.py", "learner/training/test_tensor_file.py", "reward/test_own_verifier.py",
    "rollout/engine/test_scripted.py",
    "cli/prepare/test_run.py", "cli/stack/test_runtime.py", "cli/test_audit.py", "cli/test_main.py", "common/checkpoints/test_origin.py",
    "common/models", "common/service/test_preflight.py", "common/service/test_watchdog.py",
    "common/test_data_files.py", "common/test_data_procedural.py", "common/test_data_reasoning_gym.py",
    "common/test_data_streaming.py", "deploy", "examples",
    "gateway/admission/test_checks.py", "learner/algorithms/test_advantages.py",
    "learner/algorithms/test_documented_example.py", "learner/algorithms/test_importance.py", "learner/algorithms/test_kl.py",
    "learner/algorithms/test_losses.py", "learner/algorithms/test_plugins.py",
    "learner/algorithms/test_sequence_objective.py", "learner/algorithms/test_token_advantages.py",
    "learner/algorithms/test_values.py", "learner/algorithms/test_verl.py", "learner/groups/test_data.py",
    "learner/groups/test_recorded_data.py",
    "learner/groups/test_off_policy.py", "learner/loops/test_collect.py", "learner/megatron", "learner/ranks",
    "learner/storage/test_checkpoints.py", "learner/test_buffer_simulation.py", "learner/test_import_cost.py",
    "learner/test_pause.py", "learner/test_rank.py", "learner/test_replay_plan.py", "learner/test_stall.py",
    "reward/pool", "reward/test_code.py", "reward/test_judging.py", "reward/test_plugins.py", "reward/test_verifiers.py",
    "millrace/test_frames.py", "rollout/engine/test_health.py", "rollout/engine/test_prompt_process.py", "common/models/test_prompts.py",
    "rollout/engine/test_update.py", "rollout/engine/test_verify.py", "rollout/test_engine_start.py",
    "rollout/test_orphans.py", "rollout/test_service.py", "weights/test_delta.py", "weights/test_snapshot.py",
    "weights/test_stage.py",
)  # fmt: skip
"""Modules and folders that need torch, an engine, tokenizers or datasets, start processes, or compute for seconds."""

collect_ignore = [] if find_spec("torch") else list(HEAVY)
