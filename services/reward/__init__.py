"""Reward service: verifies rollouts and sends scored groups on.

service    attaches to active jobs        session   one job's groups and their checks
pool       worker processes with limits   verifiers built in, one a file    samples   for people
"""
