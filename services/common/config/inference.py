"""Contract of chats between gateway and rollout servers: limits, headers and reasons of refusal (messages: `proto/inference.proto`)."""

from __future__ import annotations

from enum import StrEnum

PROMPT_LIMIT_BYTES = 2 << 20
"""Largest request: the gateway takes bodies of 1 MiB, which protobuf makes no larger."""

LOAD_LIMIT_S = 120.0
"""Longest wait for an exported checkpoint to be loaded; the load itself goes on."""

GENERATE_LIMIT_S = 300.0
"""Longest generation, from a place in the queue to the last token."""

MAX_TOKENS = 2048
"""Longest answer, tokens."""

REASON_HEADER = "millrace-problem"
PARAM_HEADER = "millrace-param"


class RefusalReason(StrEnum):
    """Reason why a rollout server does not answer, or stops answering."""

    NOT_FOUND = "model_not_found"
    """The job does not exist, or it has nothing to load."""
    NOT_HERE = "not_here"
    """This server does not serve the job now; another server may."""
    NOT_LOADED = "not_loaded"
    """The checkpoint cannot be loaded, or is not loaded within LOAD_LIMIT_S."""
    BUSY = "busy"
    """Every place in the queue stays taken."""
    ABORTED = "aborted"
    """Generation has begun, and training takes the engine back."""
    TOO_SLOW = "too_slow"
    """Generation takes longer than GENERATE_LIMIT_S."""
    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid_value"
