"""Reruns recorded steps of a job, in ranks of its own, and proves them bit for bit.

plan ─► pass "recorded" ─► digests, checkpoints ─► proof
          └─► pass "changed" (with --set), from the same weights ─► figures side by side
"""
