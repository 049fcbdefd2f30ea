"""What of the unit tests needs torch: where it is not installed (`make test-unit`), those are left out."""

from __future__ import annotations

from importlib.util import find_spec

NEED_TORCH = (
    "common/service/test_preflight.py", "examples/test_charlm.py",
    "learner/algorithms/test_kl.py", "learner/algorithms/test_losses.py", "learner/algorithms/test_sequence_objective.py",
    "learner/loops/test_collect.py", "learner/megatron", "learner/ranks/test_commands.py", "learner/test_pause.py",
    "learner/test_replay_plan.py", "learner/test_stall.py", "rollout/engine/test_prompt_process.py", "rollout/engine/test_update.py",
    "rollout/engine/test_verify.py", "weights/test_snapshot.py", "weights/test_stage.py",
)  # fmt: skip

collect_ignore = [] if find_spec("torch") else list(NEED_TORCH)
