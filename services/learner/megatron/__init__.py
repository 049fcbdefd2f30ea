"""Megatron-core: model, batches, parallel layout, optimizer and state of one rank."""
