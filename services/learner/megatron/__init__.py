"""Megatron-core backend of one rank: model, batches, parallel layout, optimizer and state."""
