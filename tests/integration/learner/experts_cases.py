"""Models and layouts of the tests of experts."""

from __future__ import annotations

from tests.integration.learner.platforms import runnable

MODELS = ("qwen3_moe", "plain_weights", "mixtral")
"""plain_weights: Qwen3-MoE whose experts' weights do not sum to 1."""
EXPERTS, TOP = 4, 2
COEFFICIENT = 0.3
LAYOUTS = runnable({"one": 1, "ep": 2, "ep_cp": 2, "ep_pp": 4, "ep_dist": 4, "ep_4": 4})
"""Ranks of each; ep and ep_cp have EP 2 over DP 2 and CP 2, ep_dist EP 2 of DP 4 and the distributed optimizer, ep_4 EP 4."""
QUICK = ("one", "ep")
