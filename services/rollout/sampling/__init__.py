"""Sampling: tasks from the stream to groups of rollouts, each token with its version."""
