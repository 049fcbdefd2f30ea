"""Configuration: the operator's settings, allowed paths, names of verifiers, and limits of chats."""
