"""What the demo's small models are and what they were taught: everything that their weights depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes, warm start and seed of a small model; a change of any value makes the cached model stale.

    The warm start imitates demonstrations of which a share is poor, as a base model's data are. The model learns what they
    show, and also to be wrong about as often as its teacher; what is left for reinforcement learning is to tell the two
    apart, which the reward alone can do.
    """

    version: int = 1  # of the code: raised when the same values give other weights

    architecture: str = "llama"  # or another model_type of transformers with the same sizes: gemma, qwen3_moe
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 2  # even: pipeline parallelism 2 divides
    heads: int = 4  # even, with the KV heads: tensor parallelism 2 divides
    kv_heads: int = 2
    max_positions: int = 256
    experts: int = 0  # of a layer of a mixture of experts; 0: a dense model
    experts_per_token: int = 2
    expert_intermediate_size: int = 192

    demonstrations: int = 120_000
    steps: int = 1000
    batch_size: int = 128
    lr: float = 4e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TinyRecipe(Recipe):
    """A model that is taught sums."""

    min_terms: int = 2  # reasoning-gym's `chain_sum`, in its own words: terms of 0..9 joined by + and -
    max_terms: int = 3
    min_digits: int = 1
    max_digits: int = 1
    wrong_share: float = 0.25  # demonstrations whose answer is off by 1, 2 or 3


@dataclass(frozen=True, slots=True)
class GameRecipe(Recipe):
    """A model that is taught to play an environment of several turns, one that comes along."""

    game: str = "guess_number"
    skill: float = 0.4  # share of the replies that use what the environment has said; the others ignore it
    learns_all: bool = True  # what the environment says, too
    steps: int = 700
    demonstrations: int = 50_000
