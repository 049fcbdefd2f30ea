"""Chats with OpenAI's API, passed to a rollout server over gRPC."""
