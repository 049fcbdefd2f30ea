"""What each algorithm learns on the demo's task, and how much age of data it stands.

jobs ─► run: one stack, one job after the other ─► figures ─► table, curves ─► docs/algorithms.md
"""
