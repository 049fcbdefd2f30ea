"""Checkpoints: their manifest, the fingerprint of their job, and the origin of a new job's weights. The learner's storage writes them."""
