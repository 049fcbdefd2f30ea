"""Chats in OpenAI's forms, passed on to a rollout server over gRPC."""
