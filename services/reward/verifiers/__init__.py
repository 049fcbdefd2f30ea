"""Verifiers: the built-in ones, one a file; `base` has their interface, and loads one by name."""
