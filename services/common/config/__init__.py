"""Configuration: the operator's settings, allowed paths, names of verifiers, and the bounds of chats."""
