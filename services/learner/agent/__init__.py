"""Agent: one learner's supervisor of ranks, light and always answering."""
