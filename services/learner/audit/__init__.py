"""Audit of a job's folder: what the journal says against history, checkpoints, seals and accounts."""
