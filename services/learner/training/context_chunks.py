"""Chunks of a row whose positions context parallelism (CP) divides over ranks, and the pieces of its segments that a rank computes.

    row      │ 0 │ 1 │ 2 │ 3 │     2 · CP chunks of one length; here CP is 2
    rank 0     0           3       a chunk from the front, and its mirror image from the back:
    rank 1         1   2           of one causal sequence every rank has the same number of pairs of query and key

Every rank has equally many positions. Where a row has many short segments, the pairs are equal on average only.
"""

from __future__ import annotations

from functools import lru_cache

from services.learner.training.npu_attention import Piece
from services.learner.training.prompt_sharing import pieces_of


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The two of 2 · `size` chunks that a rank computes, in their order within it."""
    return rank, 2 * size - 1 - rank


def row_order(size: int) -> list[int]:
    """For each chunk of a row its place among those of all ranks, in the order of the ranks."""
    gathered = [chunk for rank in range(size) for chunk in chunks_of(size, rank)]
    return [gathered.index(chunk) for chunk in range(2 * size)]


@lru_cache(maxsize=256)
def own_pieces(encoded: bytes, size: int, rank: int) -> tuple[Piece, ...]:
    """The rank's queries, cut where a chunk or a segment ends, with the keys of the whole row that they see.

    `encoded`: the bytes of `encode_segments`. Where a piece's queries begin counts among the rank's own positions.
    """
    whole = pieces_of(encoded)
    chunk = sum(piece.length for piece in whole) // (2 * size)
    pieces: list[Piece] = []
    reached = 0
    for first in (place * chunk for place in chunks_of(size, rank)):
        for start, length, (*before, (own, seen)) in whole:
            begin, end = max(start, first), min(start + length, first + chunk)
            if begin < end:
                pieces.append(Piece(reached, end - begin, (*before, (own, seen - (start + length - end)))))
                reached += end - begin
    return tuple(pieces)
