"""How failed calls to the learner are read."""

from __future__ import annotations

import grpc

HOPELESS = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Answers that asking again does not change."""


def describe(error: grpc.RpcError) -> str:
    """`UNAVAILABLE: failed to connect …`."""
    code, details = error.code(), error.details()
    return f"{code.name}: {details}" if code is not None else str(error)
