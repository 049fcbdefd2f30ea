"""Capacity of a job: what more rollout servers, or another off-policy bound, would give.

rates      what a run's step records measured       pipeline   the closed network of slots, servers and learner
plan       forecasts for numbers of servers         no I/O
"""
