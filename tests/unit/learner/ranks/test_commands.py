"""What the ranks are told arrives exactly as rank 0 said it."""

from __future__ import annotations

from dataclasses import fields

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from services.learner.groups.sequence import Sequence
from services.learner.ranks.commands import (
    Command,
    Export,
    Finish,
    Finite,
    Idle,
    Load,
    LoadWeights,
    Save,
    Saved,
    Train,
    Write,
    decode_command,
    encode_command,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return Sequence(
        tokens=draw(nps.arrays(np.int32, prompt + response, elements=TOKENS)),
        prompt_len=prompt,
        inference_logprobs=draw(nps.arrays(np.float32, response, elements=FLOATS)),
        advantage=draw(nps.arrays(np.float32, response, elements=FLOATS)),
        loss_mask=draw(nps.arrays(np.bool_, response)),
        group_id=draw(st.integers(0, 2**53 - 1)),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        versions=draw(st.none() | nps.arrays(np.int32, response, elements=TOKENS)),
    )


@pytest.mark.parametrize(
    "command",
    [
        Idle(),
        Finite(),
        Export(),
        Write("shm/ü", 2, 2**40),
        Finish(),
        Save("/jobs/a b/ü", export=True),
        Save("", export=False),
        Load("x"),
    ],
    ids=repr,
)
def test_a_command_survives_the_wire(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


@given(st.integers(1, 10**7), st.lists(sequences(), max_size=4))
def test_a_batch_survives_the_wire_bit_for_bit(step: int, batch: list[Sequence]) -> None:
    command = decode_command(encode_command(Train(step, batch)))
    assert isinstance(command, Train)
    assert command.step == step
    for sent, received in zip(batch, command.sequences, strict=True):
        for field in fields(Sequence):
            before, after = getattr(sent, field.name), getattr(received, field.name)
            if isinstance(before, np.ndarray):
                assert after.dtype == before.dtype
                assert after.tobytes() == before.tobytes()
            else:
                assert after == before


COMMANDS = (
    Idle(), Train(1, []), Finite(), Export(), Write("a", 1, 2), Save("a", export=True), Saved(), Load("a", optimizer=False, rng=True),
    LoadWeights("a", hugging_face=True), Finish(),
)  # fmt: skip


def test_every_command_can_be_sent() -> None:
    sent = {type(decode_command(encode_command(c))) for c in COMMANDS}
    assert sent == set(Command.__args__)
    plain = [command for command in COMMANDS if not isinstance(command, Train)]
    assert [decode_command(encode_command(command)) for command in plain] == plain


def test_an_unknown_command_is_an_error() -> None:
    with pytest.raises(KeyError, match="Explode"):
        decode_command(msgpack.packb(["Explode", []]))


def test_a_sequence_of_more_than_a_mebibyte_is_taken() -> None:
    length = 2**18
    tokens = np.arange(length + 1, dtype=np.int32)
    ones = np.ones(length, np.float32)
    long = Sequence(
        tokens, prompt_len=1, inference_logprobs=-ones, advantage=ones, loss_mask=ones.astype(bool), group_id=0
    )
    command = decode_command(encode_command(Train(1, [long])))
    assert isinstance(command, Train)
    assert np.array_equal(command.sequences[0].tokens, tokens)
