"""Scorers: what gives a group its verdicts, each kind in a module.

base       the interface of scorers, and of what stands behind them
verifiers  one verifier, in the pool's processes        rubric   a weighted sum of other scorers
"""
