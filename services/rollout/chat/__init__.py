"""Chats: a gRPC server answers them from running jobs and from exports of ended ones, at a lower priority than training."""
