"""TextArena's own games, each episode in a process as in the service.

Run by `make test-environments`: the package is no part of the other environments.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio

from services.common.sandbox.pool import Sandbox
from services.environment.base import Observation
from services.environment.players import Call, EpisodeFailed, Players

pytestmark = [
    pytest.mark.skipif(find_spec("textarena") is None, reason="make test-environments"),
    pytest.mark.asyncio(loop_scope="module"),
]

Policy = Callable[[list[str]], str]
HANOI = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def players() -> AsyncIterator[Players]:
    async with Sandbox(prepare=["services.environment.player:prepare"]) as sandbox:
        yield Players(sandbox, places=2)


def call(game: str, seed: int = 1, **settings: Any) -> Call:
    config = {"game": game, "settings": settings}
    return Call("textarena", config, seed, {}, queue_s=60.0, step_timeout_s=60.0, memory_mib=1024)


async def play(players: Players, at: Call, policy: Policy) -> Observation:
    """Plays an episode; the policy sees all messages so far."""
    async with players.episode(at) as episode:
        said, heard = await episode.reset(), list[str]()
        while not said.done:
            heard += [message.content for message in said.messages]
            said = await episode.step(policy(heard))
    return said


def crosses_the_lake(heard: list[str]) -> str:
    """The first step of a shortest way to the goal."""
    rows = [line.strip("|").split("|") for line in heard[-1].splitlines() if line.startswith("|")]
    cells = {(y, x): cell.strip() for y, row in enumerate(rows) for x, cell in enumerate(row)}
    start = next(at for at, cell in cells.items() if cell == "P")
    ways = deque([(start, list[str]())])
    seen = {start}
    while ways:
        at, way = ways.popleft()
        if cells[at] == "G":
            return f"[{way[0]}]"
        for name, (down, right) in MOVES.items():
            to = (at[0] + down, at[1] + right)
            if cells.get(to, "H") != "H" and to not in seen:
                seen.add(to)
                ways.append((to, [*way, name]))
    raise AssertionError("no way")


def breaks_the_code(heard: list[str]) -> str:
    """The first code that fits all that was said."""
    guesses = re.findall(r"\[(\d \d \d \d)\]\. Feedback: (\d) black peg\(s\), (\d) white", "\n".join(heard[1:]))
    fitting = (
        code for code in codes() if all(pegs(code, guess.split()) == (int(b), int(w)) for guess, b, w in guesses)
    )
    return f"[{' '.join(next(fitting))}]"


def codes() -> Iterator[list[str]]:
    digits = "123456"
    yield from ([a, b, c, d] for a in digits for b in digits for c in digits for d in digits if len({a, b, c, d}) == 4)


def pegs(code: list[str], guess: list[str]) -> tuple[int, int]:
    black = sum(left == right for left, right in zip(code, guess, strict=True))
    return black, len(set(code) & set(guess)) - black


@pytest.mark.parametrize(
    ("game", "policy"),
    [
        ("FrozenLake-v0", crosses_the_lake),
        ("TowerOfHanoi-v0", lambda heard: f"[{HANOI[len(heard) - 1]}]"),
        ("Mastermind-v0", breaks_the_code),
        ("FrozenLake-v0-train", crosses_the_lake),
    ],
)
async def test_a_policy_that_reads_what_it_is_told_wins_every_game(players: Players, game: str, policy: Policy) -> None:
    for seed in range(3):
        said = await play(players, call(game, seed), policy)
        assert (said.reward, said.accuracy) == (1.0, 1.0), said.detail


@pytest.mark.parametrize("game", ["FrozenLake-v0", "LightsOut-v0", "Mastermind-v0", "Bandit-v0"])
async def test_a_policy_that_says_nonsense_wins_none(players: Players, game: str) -> None:
    said = await play(players, call(game), lambda _: "I do not know")
    assert (said.reward or 0.0) < 1.0
    assert (said.accuracy or 0.0) < 1.0


@pytest.mark.parametrize("game", ["FrozenLake-v0", "LightsOut-v0", "Sokoban-v0", "Sudoku-v0"])
async def test_the_same_seed_begins_alike_and_others_do_not(players: Players, game: str) -> None:
    begun = []
    for seed in (1, 1, 2, 3, 4):
        async with players.episode(call(game, seed)) as episode:
            begun.append((await episode.reset()).messages)
    assert begun[0] == begun[1]
    assert len(set(begun)) > 1


async def test_settings_reach_the_game(players: Players) -> None:
    async with players.episode(call("FrozenLake-v0", size=6)) as episode:
        (message,) = (await episode.reset()).messages
    assert len([line for line in message.content.splitlines() if line.startswith("|")]) == 6


@pytest.mark.parametrize(
    ("game", "settings", "says"),
    [
        ("Wordle-v0", {}, "game: Wordle-v0 needs word lists of NLTK"),
        ("Hangman-v0", {}, "game: Hangman-v0 needs word lists of NLTK"),
        ("TicTacToe-v0", {}, "game: TicTacToe-v0 is not for one player"),
        ("FrozenLake", {}, "did you mean FrozenLake-v0"),
        ("FrozenLake-v0", {"holes": 1}, "settings: FrozenLake-v0 refuses them"),
    ],
)
async def test_what_cannot_be_played_here_is_refused_for_good(
    players: Players, game: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(EpisodeFailed, match=says) as failure:
        await play(players, call(game, **settings), lambda _: "")
    assert failure.value.permanent
