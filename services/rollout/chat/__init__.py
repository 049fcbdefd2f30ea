"""Chats: a gRPC server whose requests wait behind training, of running jobs and of their exports."""
