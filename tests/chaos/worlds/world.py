"""World of the chaos suite, and the plan of what goes wrong in it: functions of the seed and of the replies.

seed % 4      0: each episode goes wrong        1: those whose reply is odd        2, 3: none
"""

from __future__ import annotations

from dataclasses import dataclass

from services.environment.base import Message, Observation
from tests.chaos.worlds.deeds import DEEDS

NAME = "chaos"
TURNS = 3
"""Of an episode at most; some are over after two."""
_SHORT = "2"
"""An episode is over after two turns when the second reply begins with this digit or a smaller one."""
_KINDS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes wrong in the episodes of one seed."""

    deed: str
    turn: int
    """0: the reset."""
    only_odd: bool
    """Whether an even reply is answered well."""

    def strikes(self, turn: int, reply: str = "") -> bool:
        """Whether it happens here."""
        return turn == self.turn and not (self.only_odd and int(reply.partition(" ")[0]) % 2 == 0)


def plan_of(seed: int) -> Plan | None:
    """What goes wrong in a seed's episodes where the world is hostile."""
    kind, number = seed % _KINDS, seed // _KINDS
    if kind > 1:
        return None
    only_odd, turn = kind == 1, number // len(DEEDS) % TURNS
    return Plan(list(DEEDS)[number % len(DEEDS)], max(turn, 1) if only_odd else turn, only_odd)


def first(seed: int) -> Observation:
    """What is said first."""
    return Observation((Message("user", f"row {seed}"),))


def answer(seed: int, turn: int, reply: str) -> Observation:
    """What is said to a reply; at the end, whether its last number is the seed's parity."""
    if turn == TURNS or (turn > 1 and reply[0] <= _SHORT):
        right = float(int(reply.rpartition(" ")[2]) == seed % 2)
        return Observation(done=True, reward=right, accuracy=right, detail=f"over after {turn} turns")
    return Observation((Message("tool" if seed % 2 else "user", f"{reply.partition(' ')[0]} was heard: go on"),))
