"""Weights on the wire: snapshots of tensors, deltas between versions, the channel's options, and the file in which they are staged."""
