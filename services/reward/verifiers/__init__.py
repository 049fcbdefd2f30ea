"""The built-in verifiers, one a file, and the way to load one by name."""
