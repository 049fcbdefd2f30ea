"""Weights on the wire: snapshots of tensors, deltas between versions, the channel's limits, and the file they wait in."""
