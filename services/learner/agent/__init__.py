"""Agent of a learner node: supervises the ranks; it is light and always responds."""
