"""The script: what stands in for a model. Weights are a hash chain over the batches, in order; tokens are a hash of the weights.

batch 1, 2, … n ──► chain ──► state n ──► weights n ──► fingerprint ──► token(fingerprint, row, rollout, position)

So weights prove which batches were trained, in which order, each once; and a token proves with which weights it was sampled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import xxhash

from services.common.streams.types import Float32Array, Message
from services.learner.groups.sequence import Sequence as Sample

DATA_SOURCE = "openai/gsm8k"
GROUP_SIZE = 4
TOKENS = 4
"""Length of every response."""
HIDDEN, HEAD_DIM, INTERMEDIATE = 16, 32, 8
VOCABULARY = 128
END_OF_TURN = 127
"""Closes an answer in a conversation; never sampled."""
_LAYER = "model.layers.0"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    f"{_LAYER}.self_attn.q_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}.self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}.self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}.self_attn.o_proj.weight": (HIDDEN, HEAD_DIM),
    f"{_LAYER}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    f"{_LAYER}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    f"{_LAYER}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    f"{_LAYER}.input_layernorm.weight": (HIDDEN,),
    f"{_LAYER}.post_attention_layernorm.weight": (HIDDEN,),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
"""The tensors of a Llama of one layer and one head: a model that real engines and ranks could load, too."""
GENESIS = bytes(16)
"""The state before the first step."""


def advance(state: bytes, batch: Iterable[Sample]) -> bytes:
    """The state after one more step: 16 bytes that depend on every value of every batch so far, and on their order."""
    digest = xxhash.xxh3_128(state)
    for sample in batch:
        digest.update(struct.pack("<qqq", sample.group_id, sample.prompt_len, len(sample.tokens)))
        for array in (
            sample.tokens.astype("<i4"),
            sample.inference_logprobs.astype("<f4"),
            sample.advantage.astype("<f4"),
        ):
            digest.update(array.tobytes())
    return digest.digest()


def weights(state: bytes) -> dict[str, Float32Array]:
    """The tensors of a state, all finite."""
    made: dict[str, Float32Array] = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        key = np.frombuffer(state, np.uint64).copy()
        key[0] ^= np.uint64(number)
        raw = np.random.Philox(key=key).random_raw(math.prod(shape))
        made[name] = (raw >> np.uint64(40)).astype(np.float32).reshape(shape)
    return made


def fingerprint(tensors: Mapping[str, Float32Array]) -> bytes:
    """Names a set of weights: 16 bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.digest()


@lru_cache(maxsize=4096)
def fingerprint_of_state(state: bytes) -> bytes:
    """The fingerprint of a state's weights."""
    return fingerprint(weights(state))


def token(mark: bytes, row: int, rollout: int, position: int) -> int:
    """The token that these weights sample at this place: a digit's code."""
    return ord("0") + xxhash.xxh3_64_intdigest(mark + struct.pack("<qqq", row, rollout, position)) % 10


def logprob(token_id: int) -> float:
    """Its log-prob; exact in float32."""
    return -(token_id % 16) / 8 - 0.125


def text(token_ids: Sequence[int]) -> str:
    """The response in words; its last number is the answer: the parity of the last token."""
    return f"{''.join(map(chr, token_ids))} #### {token_ids[-1] % 2}"


def answer(row: int) -> str:
    """The reference answer of a row."""
    return str(row % 2)


def is_right(row: int, token_ids: Sequence[int]) -> bool:
    """What the verifier must say of a response."""
    return str(int(token_ids[-1]) % 2) == answer(row)


def prompt(row: int) -> str:
    """The prompt of a row."""
    return f"row {row}"


def encode(messages: Iterable[Message]) -> list[int]:
    """The prompt's token ids: its bytes."""
    return list("".join(message.content for message in messages).encode())


def bridge(messages: Iterable[Message]) -> list[int]:
    """The token ids between two turns: the end of the first, and what answers it."""
    return [END_OF_TURN, *encode(messages)]


def row_of(prompt_token_ids: Sequence[int]) -> int:
    """The row that a prompt asks.

    Raises:
        ValueError, IndexError: it asks none.
    """
    return int(bytes(int(token_id) for token_id in prompt_token_ids).split()[-1])
