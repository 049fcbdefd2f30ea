"""Environments: worlds that a policy takes turns with, each episode in a child process that can be killed.

base       what an environment is          registry   those that are there, by name
player     one episode, in the child       players    places, deadlines, children
worlds     the environments that come along   switches   what the operator lets them do
"""
