"""Channel of the weight transfer: sizes, keepalive, deadlines and the token's header, equal at both ends."""

from __future__ import annotations

CHUNK_BYTES = 1 << 20
"""Payload bytes of a chunk: the fastest size for Python's gRPC, and well below the message limit."""

REQUEST_LIMIT_BYTES = 64 << 10
"""Largest message that the server accepts: requests and reports are small."""

REPLY_LIMIT_BYTES = 16 << 20
"""Largest message that a client accepts: the manifest of 100,000 tensors is about 12 MB."""

FETCH_LIMIT_S = 600.0
"""Longest Fetch that the server serves: a client that stops reading must not keep an old snapshot in memory for ever."""

WATCH_LIMIT_S = 300.0
"""Longest Watch; then the client calls it again."""

TOKEN_HEADER = "authorization"  # noqa: S105  the name of a header

Options = list[tuple[str, int]]
Metadata = tuple[tuple[str, str], ...]

CLIENT_OPTIONS: Options = [
    ("grpc.max_receive_message_length", REPLY_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]

SERVER_OPTIONS: Options = [
    ("grpc.max_receive_message_length", REQUEST_LIMIT_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients ping every 30 s; the default (5 min) would cut them off with "too many pings".
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A busy machine delivers pings late and all at once: that is no attack, and a closed connection costs a version.
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers must not share a port silently.
    ("grpc.so_reuseport", 0),
]


def bearer(token: str) -> str:
    """Value of the token's header."""
    return f"Bearer {token}"


def token_metadata(token: str | None) -> Metadata:
    """Metadata that a client sends with every call."""
    return ((TOKEN_HEADER, bearer(token)),) if token else ()
