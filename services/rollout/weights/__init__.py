"""Weights from the learner: announced, fetched, staged, and activated in the engine."""
