"""Environments that come along, a file for each; `ENVIRONMENT` is its class."""
