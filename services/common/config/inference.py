"""What gateway and rollout servers agree on besides the messages of `proto/inference.proto`: limits, and the names of refusals."""

from __future__ import annotations

from enum import StrEnum

from services.common.weights.channel import CLIENT_OPTIONS, SERVER_OPTIONS, Options

PROMPT_LIMIT_BYTES = 2 << 20
"""Largest request: the gateway takes bodies of 1 MiB, which protobuf makes no larger."""

LOAD_LIMIT_S = 120.0
"""Longest wait for an exported checkpoint to be loaded; the load itself goes on."""

GENERATE_LIMIT_S = 300.0
"""Longest generation, from a place in the lane to the last token."""

MAX_TOKENS = 2048
"""Longest answer, tokens."""

PROBLEM_HEADER = "millrace-problem"
PARAM_HEADER = "millrace-param"


class Problem(StrEnum):
    """Why a rollout server does not answer, or stopped answering."""

    NOT_FOUND = "model_not_found"
    """No such job, or it has nothing to load."""
    NOT_HERE = "not_here"
    """This server does not serve the job now; another may."""
    NOT_LOADED = "not_loaded"
    """The checkpoint cannot be loaded, or was not in time."""
    BUSY = "busy"
    """Every place of the lane stayed taken."""
    ABORTED = "aborted"
    """It had begun, and training took the engine back."""
    TOO_SLOW = "too_slow"
    """It was not done within GENERATE_LIMIT_S."""
    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid_value"


INFERENCE_SERVER_OPTIONS: Options = [
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", PROMPT_LIMIT_BYTES),
]
INFERENCE_CLIENT_OPTIONS: Options = CLIENT_OPTIONS
