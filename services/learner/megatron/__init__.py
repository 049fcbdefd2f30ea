"""Megatron-core backend of one rank.

trainer                           one training step: every role's passes and optimizer steps
actor critic value_head           models that are trained; estimates, columns: what they say of a batch before it
optimizer schedule update         an optimizer step; tally, stats: its figures
passes batch micro_batches        a batch as tensors, through Megatron's schedule; prompt_sharing, attention, logprobs: within it
model bridges parallel platform   a rank's part of a model; state, role, weights, tensor_file, background: on disk
saved parts resharding            a checkpoint of all ranks, read in another layout
"""
