"""Sampling: tasks from the stream become groups of rollouts, each token with its policy version."""
