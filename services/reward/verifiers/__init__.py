"""Verifiers: the built-in ones, one a file, and the registry that loads one by name."""
