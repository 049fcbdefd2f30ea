"""What the end of an episode's stream means: whether its server is still there."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from services.common.environments.client import _failure
from services.common.environments.types import Reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.LOST),
        (grpc.StatusCode.INTERNAL, Reason.LOST),  # "Internal error from Core": the server died while the stream began
        (grpc.StatusCode.UNKNOWN, Reason.ERROR),
        (grpc.StatusCode.UNAUTHENTICATED, Reason.ERROR),
    ],
)
def test_a_server_whose_connection_broke_is_lost_and_one_that_refuses_a_call_is_not(
    code: grpc.StatusCode, reason: Reason
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why")
    failure = _failure("environment w: the service failed", error)
    assert (failure.reason, failure.permanent) == (reason, False)
    assert str(failure) == f"environment w: the service failed: {code.name}: why"
