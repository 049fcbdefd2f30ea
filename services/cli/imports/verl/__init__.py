"""verl's configuration: `ppo_trainer` and `ppo_megatron_trainer` of version 0.9.1, and the DAPO recipe's keys.

table      all of it as one source            defaults   verl's own values of keys that matter
objective  losses, KL, advantages, filters    training   batches, optimizers, critic, ranks
sampling   data, rollouts, evaluation, steps
"""
