"""Mathematics of the learner: pure functions, numpy for rewards and torch for tokens."""
