"""Reward service: verifies rollouts and sends scored groups on.

service    attaches to active jobs        session   one job's stream        judging   a group's checks
pool       worker processes with limits   verifiers built in, one a file    samples   for people
"""
