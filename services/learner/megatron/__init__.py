"""Megatron-core backend of one rank.

trainer   one training step          actor, critic, value_head   roles: models that are trained          estimates, columns   what they say of a batch
passes    forward and backward       batch, micro_batches, prompt_sharing, attention, logprobs           optimizer, schedule, update, tally, stats
model     a rank's part of a model   bridges, parallel, platform, collectives, rendezvous                state, weights, tensor_file, background
"""
