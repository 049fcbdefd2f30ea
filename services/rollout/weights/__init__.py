"""Weights from the learner: announced, fetched, staged, and given to the engine."""
