"""Reward service: judges rollouts and sends scored groups on.

service    attaches to active jobs              session    one job's groups, from stream to stream
dispatch   data_source → scorer → verdicts      scorers    their interface, verifiers and rubrics
models     judges and reward models of all jobs: judge, reward_model
pool       worker processes with limits         verifiers  built in, one a file
samples    for people
"""
