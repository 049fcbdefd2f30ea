"""Environments as the rollout service sees them: a stream for each episode, with the service's own deadlines."""
