"""Checkpoints as everybody reads them: manifest, fingerprint of what they belong to, and where a new job begins."""
