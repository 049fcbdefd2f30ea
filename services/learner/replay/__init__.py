"""Replay of a job's recorded steps, in ranks of its own: proves them bit for bit.

plan ─► pass "recorded" ─► digests, checkpoints ─► proof
          └─► pass "changed" (with --set), from the same weights ─► figures side by side
"""
