"""Training of one rank, whatever computes it.

trainer                      one training step: every role's passes and optimizer steps
actor critic value_head      models that are trained; estimates, columns: what they say of a batch before it
backend layout platform      what a back end gives: models, optimizers, state on disk; the ranks and their machine
passes batch micro_batches   a batch as tensors; prompt_sharing, logprobs: within it
cuda_ npu_attention          kernels of these two; fused_logprobs
schedule update tally stats  an optimizer step's rate and figures
directory tensor_file        weights on disk; background: beside the training
"""
