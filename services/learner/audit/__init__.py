"""Audit of a job's folder: the journal against history, checkpoints, seals and the accounts of groups."""
