"""Commands from rank 0 to all ranks, and their broadcast: MessagePack in a byte tensor, never a pickle."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, get_args

import msgpack
import numpy as np

from services.learner.groups.sequence import Sequence
from services.learner.training.pools import Pools

_MAX_COMMAND_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do: keeps every rank's wait short."""


@dataclass(frozen=True, slots=True)
class Train:
    """One optimizer step."""

    step: int
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True)
class Finite:
    """Every rank checks whether its parameters are finite."""


@dataclass(frozen=True, slots=True)
class Export:
    """Gather the weights on rank 0."""


@dataclass(frozen=True, slots=True)
class Write:
    """Gather the weights on rank 0, which writes them as a version's safetensors file."""

    path: str
    lineage: int
    n: int


@dataclass(frozen=True, slots=True)
class Save:
    """Every rank copies its part of a checkpoint and begins to write it into the directory; with `export`, Hugging Face files too."""

    path: str
    export: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """Every rank reports the result of its last `Save`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Every rank reads its part of a checkpoint from the directory, with or without the optimizer's moments and the random states."""

    path: str
    optimizer: bool = True
    rng: bool = True


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Every rank begins at step 0 from the weights in the directory: a checkpoint's parts, or a Hugging Face directory."""

    path: str
    hugging_face: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave the loop."""


Command = Idle | Train | Finite | Export | Write | Save | Saved | Load | LoadWeights | Finish


def encode_command(command: Command) -> bytes:
    """The command as MessagePack."""
    if isinstance(command, Train):
        body: tuple[Any, ...] = (command.step, [_pack_sequence(s) for s in command.sequences])
    else:
        body = astuple(command)
    return bytes(msgpack.packb([type(command).__name__, body]))


def decode_command(payload: bytes) -> Command:
    """The command in a payload of `encode_command`."""
    kind, body = msgpack.unpackb(payload, max_bin_len=_MAX_COMMAND_BYTES, max_array_len=100_000_000)
    if kind == "Train":
        return Train(body[0], [_unpack_sequence(s) for s in body[1]])
    known: dict[str, type[Command]] = {cls.__name__: cls for cls in get_args(Command)}
    return known[kind](*body)


def share(command: Command | None, pools: Pools) -> Command:
    """Broadcasts rank 0's command; the other ranks pass None. They wait at most the process group's timeout."""
    if pools.alone:
        if command is None:
            raise ValueError("rank 0 gives the command")
        return command
    payload = pools.broadcast(None if command is None else encode_command(command))
    return decode_command(payload) if command is None else command


def _pack_sequence(sequence: Sequence) -> list[Any]:
    return [
        sequence.tokens.astype("<i4").tobytes(), sequence.prompt_len, sequence.inference_logprobs.astype("<f4").tobytes(),
        sequence.advantage.astype("<f4").tobytes(), sequence.loss_mask.astype("u1").tobytes(), sequence.group_id,
        sequence.reward, None if sequence.versions is None else sequence.versions.astype("<i4").tobytes(),
    ]  # fmt: skip


def _unpack_sequence(item: list[Any]) -> Sequence:
    tokens, prompt_len, inference_logprobs, advantage, loss_mask, group_id, reward, versions = item
    return Sequence(
        tokens=np.frombuffer(tokens, "<i4"),
        prompt_len=prompt_len,
        inference_logprobs=np.frombuffer(inference_logprobs, "<f4"),
        advantage=np.frombuffer(advantage, "<f4"),
        loss_mask=np.frombuffer(loss_mask, "u1").astype(bool),
        group_id=group_id,
        reward=reward,
        versions=None if versions is None else np.frombuffer(versions, "<i4"),
    )
