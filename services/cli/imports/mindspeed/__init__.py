"""MindSpeed-RL's configurations of GRPO, DAPO and PPO: `megatron_training`, `actor_config`, `rl_config` and `generate_config`.

table     all of it as one source     keys   names of keys that have no counterpart, by reason
training  batches, ranks, optimizers  objective  losses, advantages, filters
rewards   verifiers and rubrics
"""
